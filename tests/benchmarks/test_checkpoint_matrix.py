"""Some cells of the matrix of checkpoints in real processes, and what the committed results say of all."""

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint_matrix.cells import KINDS, End, Subject, resume_all, save_all
from benchmarks.checkpoint_matrix.run import RESULTS
from tests.helpers.aio import aio_is_compiled
from tests.helpers.ranks import run_ranks

TWO = [End(kind, 2) for kind in ("ddp", "fsdp2", "tensor_parallel", "zero_2", "zero_3", "zero_infinity")]
ONE = [End(kind, 1) for kind in ("single", "fsdp2_file", "zero_1", "zero_3", "zero_offload")]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_goes_on_exactly_under_any_other_strategy(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two ranks to one and back, in a ring through all strategies that has every one on both sides."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    subject = Subject(optimizer, False)
    two = [end for end in TWO if end.kind != "zero_infinity" or aio_is_compiled()]
    for size, ends in ((1, ONE), (2, two)):
        for ended in run_ranks(save_all, size, tmp_path / f"save-{size}", ends, subject, tmp_path):
            assert ended.result == {}, ended.output[-3000:]
    rows = []
    for size, sources, targets in ((1, two, ONE), (2, ONE, two)):
        cells = [(source, targets[number % len(targets)]) for number, source in enumerate(sources)]
        cells += [(sources[number % len(sources)], target) for number, target in enumerate(targets[::-1])]
        ended = run_ranks(resume_all, size, tmp_path / f"resume-{size}", cells, subject, tmp_path)
        assert ended[0].code == 0, ended[0].output[-3000:]
        rows += ended[0].result
    assert len(rows) >= 20
    assert [row for row in rows if row["verdict"] != "exact"] == []


def test_committed_cells_are_exact() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [row for row in rows if row["verdict"] != "exact"] == []
    pairs = {(row["source"]["kind"], row["target"]["kind"]) for row in rows}
    assert pairs == {(source, target) for source in KINDS for target in KINDS}
    sizes = {(row["target"]["kind"], row["target"]["world_size"]) for row in rows}
    assert {size for _, size in sizes} == {1, 2, 3, 4}
