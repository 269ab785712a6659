from dataclasses import replace

from lightning_memfit.bench.record import Speed
from lightning_memfit.bench.table import markdown

from .results import result

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


def test_noise_hardware_and_commit_are_stated():
    text = markdown([result("a")])
    assert "medians of 5 optimizer steps" in text
    assert "differences below 30 % are noise" in text  # (0.7 - 0.4) / 2 / 0.5
    assert "cpu, 2 x86_64 cores, 1 used" in text
    assert "commit 0123456789ab." in text
    assert "quiet" in text


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
