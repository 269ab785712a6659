"""Tools side by side, and what is said of them."""

from lightning_memfit.bench.record import Memory, Result, Speed
from lightning_memfit.bench.table import better_peers, grouped, markdown, side_by_side

from .results import out_of_memory, result
from .test_table import cells

MIB = 2**20


def of(peer: str, live: int | None = 100, resident: int | None = 200, step: float = 0.5, **changes) -> Result:
    memory = Memory(live and live * MIB, None, {}, None, None, 10**9, resident and resident * MIB)
    speed = Speed(5, step, step * 0.9, step * 1.1, 4 / step, None, 0.0)
    return result(peer or "ours", None, **{"group": "all", "peer": peer, "measured": memory, "speed": speed, **changes})


def test_a_group_is_a_row_and_a_tool_a_column() -> None:
    text = side_by_side([of(""), of("torchao", 80), of("hf_trainer", 120), result("alone")])
    row = cells(text.split("\n\n**Added")[0], "all")
    assert list(row.values()) == ["all", "100.0", "120.0", "80.0"]
    assert list(row) == ["", "lightning-memfit", "HF Trainer", "torchao"]
    assert list(grouped([result("alone")])) == []


def test_what_is_missing_is_said() -> None:
    gone = of("deepspeed", None)
    text = side_by_side([of(""), gone, of("torchao", status="unsupported", speed=None)])
    row = cells(text.split("\n\n**Added")[0], "all")
    assert (row["DeepSpeed by hand"], row["torchao"]) == ("n/a", "unsupported")
    oom = out_of_memory("b")
    other = Result(**{**vars(oom), "group": "other", "peer": "hf_trainer"})
    assert "| other | - | out of memory |" in side_by_side([of(""), other])


def test_better_peers_are_named_and_noise_is_not() -> None:
    lines = better_peers([of(""), of("lightning", 99, 190), of("hf_trainer", 90, 150), of("torchao", 200, 400, 0.25)])
    assert lines == [
        "all: HF Trainer needs 10% less memory of live tensors than ours.",
        "all: HF Trainer needs 25% less added resident memory than ours.",
        "all: torchao is 2.00 times as fast as ours: its slow steps take less than our fast ones.",
    ]
    assert better_peers([of(""), of("lightning", 100, 200, 0.45)]) == ["Nowhere, beyond noise."]


def test_the_table_of_an_experiment_begins_with_its_groups() -> None:
    text = markdown([of("", title="ours"), of("hf_trainer", title="theirs", options={"optim": "adafactor"})])
    assert text.startswith("**Peak of live tensors, MiB**")
    assert "- theirs: `optim=adafactor`" in text
    assert "nothing is predicted for them" in text
    assert "Peak of live tensors" not in markdown([result("a")])


def test_speeds_of_a_busy_machine_say_nothing() -> None:
    busy = {"hardware": {"device": "cpu", "cores": 2, "load": 7.5}}
    rows = [of(""), of("torchao", 100, 200, 0.25, **busy)]
    assert better_peers(rows) == ["Nowhere, beyond noise."]
    text = side_by_side(rows)
    speeds = text.split("**Samples a second**")[1].split("**Loss")[0]
    assert cells(speeds, "all")["torchao"] == "busy"
    assert "busy: other programs" in text
    assert cells(text.split("\n\n**Added")[0], "all")["torchao"] == "100.0"
    assert "busy" not in side_by_side([of(""), of("torchao")])
