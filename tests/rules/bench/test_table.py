from dataclasses import replace

from lightning_memfit.bench.record import Memory, Result, Speed
from lightning_memfit.bench.table import better_peers, grouped, markdown, print_table, side_by_side

from .results import out_of_memory, result

MIB = 2**20
SOURCE = {"samples_per_second": 8.0, "memory_mb": 1000}


def cells(text: str, title: str) -> dict[str, str]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    [row] = [line for line in lines if line[0] == title]
    return dict(zip(lines[0], row, strict=True))


def test_ours_beside_predicted_and_the_sources():
    first = result("a", 90 * MIB, 100 * MIB, reference=SOURCE)
    faster = Speed(5, 0.25, 0.25, 0.25, 16.0, None, 0.0)
    second = result("b", 50 * MIB, 50 * MIB, speed=faster, reference={"samples_per_second": 4.0, "memory_mb": 500})
    row = cells(markdown([first, second]), "title of b")
    assert row["measured MiB"] == "50.0"
    assert row["predicted MiB"] == "50.0"
    assert row["speed x first"] == "2.00"
    assert row["memory x first"] == "0.50"
    assert row["source: speed x first"] == "0.50"
    assert row["source: memory x first"] == "0.50"
    assert cells(markdown([first, second]), "title of a")["error"] == "-10.00 %"


def test_on_cuda_ratios_are_of_what_the_driver_counts():
    def on_cuda(row: str, used: int, process: int | None):
        memory = Memory(50 * MIB, 60 * MIB, {}, process, used, 10**9)
        return result(row, 50 * MIB, 50 * MIB, device="cuda", measured=memory)

    row = cells(markdown([on_cuda("a", 10**9, 8 * 10**8), on_cuda("b", 10**9, 4 * 10**8)]), "title of b")
    assert (row["used MB (NVML)"], row["memory x first"]) == ("400", "0.50")
    row = cells(markdown([on_cuda("a", 10**9, None), on_cuda("b", 2 * 10**9, None)]), "title of b")
    assert (row["used MB (NVML)"], row["memory x first"]) == ("2,000", "2.00")


def test_out_of_memory_and_missing_figures_are_said():
    text = markdown([result("a"), out_of_memory("b"), result("c", None, no_prediction="no trace")])
    assert cells(text, "title of b")["step s (5 % to 95 %)"] == "out of memory"
    assert cells(text, "title of b")["samples/s"] == "-"
    assert cells(text, "title of b")["error"] == "-", "a peak that was not reached is no measurement"
    assert "title of b: OutOfMemoryError: Tried to allocate 3 MiB" in text
    assert "title of c: no prediction, for no trace" in text


def test_noise_hardware_and_commit_are_stated():
    text = markdown([result("a")])
    assert "medians of 5 optimizer steps" in text
    assert "is 30 % of the median" in text  # (0.7 - 0.4) / 2 / 0.5
    assert "cpu, 2 x86_64 cores, 1 used" in text
    assert "commit 0123456789ab." in text
    assert "quiet" in text


def test_a_prediction_that_is_right_has_no_minus():
    assert cells(markdown([result("a", 10**7 - 1, 10**7)]), "title of a")["error"] == "+0.00 %"


def test_speeds_of_a_busy_machine_are_marked():
    busy = result("a", hardware={"cores": 2, "load": 9.5})
    quiet = result("b", hardware={"cores": 2, "load": 1.5})
    text = markdown([busy, quiet])
    assert "1 of 2 rows were timed while other programs kept the cores busy" in text
    assert "say little: title of a." in text
    assert "All rows were timed while" in markdown([busy])
    assert "busy" not in markdown([quiet])
    # Where it is known how long threads waited for a core, the load before the run says nothing.
    waited = [replace(row, speed=Speed(5, 1, 1, 1, 4, None, 0.0, share)) for row, share in ((busy, 0.01), (quiet, 0.2))]
    assert [row.had_cores for row in waited] == [True, False]


def test_the_terminal_shows_the_same_rows(capsys):
    print_table([result("a", reference=SOURCE), out_of_memory("b")], "T")
    output = capsys.readouterr().out
    assert "title of a" in output
    assert "out of memory" in output
    assert "source" not in output


# Tools side by side, and what is said of them.


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
