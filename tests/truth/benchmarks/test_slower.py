"""Pages name at their top what is slower than what it is compared with."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.bench_pages import paragraph, results_of, rows_with_reasons, slower
from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.experiment import load_experiment
from lightning_memfit.bench.record import Result
from tests.rules.bench.results import result


def _row(name: str, speed: float, **changes: Any) -> Result:
    made = result(name, title=name)
    assert made.speed is not None
    return replace(made, speed=replace(made.speed, samples_per_second=speed), reference={}, **changes)


def test_a_row_is_compared_with_the_first() -> None:
    found = slower([_row("first", 10), _row("slow", 8), _row("quick", 9.5)])
    assert [(one.result.row, one.times, one.than) for one in found] == [("slow", 0.8, "the first row")]


def test_a_row_with_a_source_is_compared_with_its_ratio() -> None:
    """Half as fast as the first row is no news where the source says so, too."""
    rows = [_row("first", 10), _row("same", 5), _row("less", 5)]
    given = [replace(row, reference={"samples_per_second": value}) for row, value in zip(rows, (8, 4, 6), strict=True)]
    assert [(one.result.row, one.times) for one in slower(given)] == [("less", pytest.approx(0.5 / 0.75))]


def test_ours_is_compared_with_the_fastest_tool_of_its_group() -> None:
    rows = [
        _row("ours", 8, group="a"),
        _row("theirs", 7, group="a", peer="lightning"),
        _row("faster", 10, group="a", peer="hf_trainer"),
        _row("alone", 1, group="b"),
    ]
    (one,) = slower(rows)
    assert (one.result.row, one.times, one.than) == ("ours", 0.8, "HF Trainer")
    assert one.figures == "a: 0.80x of HF Trainer"
    assert "- a: 0.80x of HF Trainer. Not explained yet." in paragraph(rows, "CUDA")


def test_a_fault_of_a_commit_stands_first_and_explains_what_it_concerns() -> None:
    commit = "413463a38a78-dirty"
    used = {"callbacks": [{"class_path": "lightning_memfit.ActivationCheckpointing"}]}
    rows = [_row("first", 10), _row("used", 4, commit=commit, settings=used), _row("other", 4, commit=commit)]
    _, heading, _, *lines = paragraph(rows, "CUDA").splitlines()
    assert heading.startswith("**CUDA: below 0.9x")
    assert lines[0].startswith("- Measured at 413463a, whose checkpointing compared every saved tensor")
    assert lines[1:] == [
        "- used: 0.40x of the first row. At 413463a, see above.",
        "- other: 0.40x of the first row. Not explained yet.",
    ]
    assert paragraph([], "CUDA") == ""


def test_times_of_busy_cores_are_said_to_be_such() -> None:
    busy = replace(_row("slow", 5), hardware={"load": 9.0, "cores": 2})
    assert slower([_row("first", 10), busy])[0].figures == "slow: 0.50x of the first row, busy"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_reasons_are_those_of_rows_that_exist(file: Any) -> None:
    experiment = load_experiment(file, "small", "cpu", read_recipe)
    assert rows_with_reasons(file.stem) <= {row.name for row in experiment.rows}


def test_the_rows_of_bert_large_that_nobody_noticed_are_named() -> None:
    experiment = load_experiment(FOLDER / "bert_large.yaml", "full", "cuda", read_recipe)
    assert {one.result.row for one in slower(results_of(experiment))} >= {"checkpointing", "micro_batch_checkpointing"}
