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
WITH_SCALAR = {"single", "ddp", "zero_1", "zero_2", "zero_3"}


@pytest.mark.nightly
@pytest.mark.nightly_cases("adamw")
@pytest.mark.parametrize("subject", [Subject("adamw", False), Subject("sgd", True)], ids=lambda subject: subject.name)
def test_training_goes_on_exactly_under_another_strategy(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two ranks to one and from one to two, so that every strategy is on both sides."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    one, two = (
        [end for end in ends if not subject.with_scalar or end.kind in WITH_SCALAR]
        for ends in (ONE, [end for end in TWO if end.kind != "zero_infinity" or aio_is_compiled()])
    )
    for size, ends in ((1, one), (2, two)):
        for ended in run_ranks(save_all, size, tmp_path / f"save-{size}", ends, subject, tmp_path):
            assert ended.result == {}, ended.output[-3000:]
    rows = []
    count = max(len(one), len(two))
    for size, sources, targets in ((1, two, one), (2, one, two)):
        cells = [(sources[n % len(sources)], targets[(n + 1) % len(targets)]) for n in range(count)]
        ended = run_ranks(resume_all, size, tmp_path / f"resume-{size}", cells, subject, tmp_path)
        assert ended[0].code == 0, ended[0].output[-3000:]
        rows += ended[0].result
    assert len(rows) == 2 * count
    assert [row for row in rows if row["verdict"] != "exact"] == []


def test_committed_cells_are_exact() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [row for row in rows if row["verdict"] != "exact"] == []
    pairs = {(row["source"]["kind"], row["target"]["kind"]) for row in rows}
    assert pairs == {(source, target) for source in KINDS for target in KINDS}
    sizes = {(row["target"]["kind"], row["target"]["world_size"]) for row in rows}
    assert {size for _, size in sizes} == {1, 2, 3, 4}
