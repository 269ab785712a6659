"""Tools side by side, and what is said of them."""

from benchmarks.bench_pages import better_peers, grouped, side_by_side
from lightning_memfit.bench.record import Memory, Result, Speed
from tests.rules.bench.results import out_of_memory, result
from tests.rules.bench.test_table import MIB, cells


def of(peer: str, live: int | None = 100, resident: int | None = 200, step: float = 0.5, **changes) -> Result:
    memory = Memory(live and live * MIB, None, {}, None, None, 10**9, resident and resident * MIB)
    speed = Speed(5, step, step * 0.9, step * 1.1, 4 / step, None, 0.0)
    return result(peer or "ours", None, **{"group": "all", "peer": peer, "measured": memory, "speed": speed, **changes})


def test_a_group_is_a_row_and_a_tool_a_column() -> None:
    text = side_by_side([of(""), of("torchao", 80), of("hf_trainer", 120), result("alone")])
    row = cells(text.split("\n\n")[1], "all")
    figures = "200.0 / 8.00 / 1.000"
    assert list(row.values()) == ["all", f"100.0 / {figures}", f"120.0 / {figures}", f"80.0 / {figures}"]
    assert list(row) == ["", "lightning-memfit", "HF Trainer", "torchao"]
    assert list(grouped([result("alone")])) == []


def test_what_is_missing_is_said() -> None:
    gone = of("deepspeed", None)
    text = side_by_side([of(""), gone, of("torchao", status="unsupported", speed=None)])
    row = cells(text.split("\n\n")[1], "all")
    assert row["DeepSpeed by hand"].startswith("n/a / 200.0")
    assert row["torchao"] == "unsupported"
    oom = out_of_memory("b")
    other = Result(**{**vars(oom), "group": "other", "peer": "hf_trainer"})
    assert "| other | - | out of memory |" in side_by_side([of(""), other])


def test_better_peers_are_named_and_noise_is_not() -> None:
    lines = better_peers([of(""), of("lightning", 99, 190), of("hf_trainer", 90, 150), of("torchao", 200, 400, 0.25)])
    assert lines == ["all: HF Trainer (10% less live tensors, 25% less resident memory); torchao (2.00 times as fast)."]
    assert better_peers([of(""), of("lightning", 100, 200, 0.45)]) == ["Nowhere, beyond noise."]


def test_speeds_of_a_busy_machine_say_nothing() -> None:
    busy = {"hardware": {"device": "cpu", "cores": 2, "load": 7.5}}
    rows = [of(""), of("torchao", 100, 200, 0.25, **busy)]
    assert better_peers(rows) == ["Nowhere, beyond noise."]
    assert cells(side_by_side(rows).split("\n\n")[1], "all")["torchao"].startswith("100.0 / 200.0 / busy")
    assert "busy" not in side_by_side([of(""), of("torchao")])
