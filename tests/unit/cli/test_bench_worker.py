"""What the process of a measured run says of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli.bench_worker import _Run


@pytest.mark.parametrize(("tensor_parallel_size", "replicas"), [(None, 4), (2, 2), (4, 1)])
def test_ranks_that_share_a_batch_count_its_samples_once(
    tmp_path: Path, tensor_parallel_size: int | None, replicas: int
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"warmup_steps": 0}))
    run = _Run(tmp_path)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    if tensor_parallel_size is not None:
        strategy.tensor_parallel_size = tensor_parallel_size
    run.trainer = SimpleNamespace(strategy=strategy, world_size=4)  # type: ignore[assignment]
    run.times.clock.start()
    run.times.clock.batch_ends({"input_ids": torch.zeros(3, 5, dtype=torch.long)}, None)
    run.times.clock.step_ends(torch.device("cpu"))
    speed = run.outcome()["speed"]
    assert speed["samples_per_second"] * speed["step_seconds_median"] == pytest.approx(3 * replicas)
    assert speed["tokens_per_second"] * speed["step_seconds_median"] == pytest.approx(15 * replicas)
