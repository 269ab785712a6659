"""What the process of a measured run says of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from cli.bench import read_recipe
from cli.bench_worker import _Run
from lightning_memfit.bench.experiment import load_experiment
from lightning_memfit.bench.runner import job_of


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
    run.observer.clock.start()
    run.observer.clock.batch_ends({"input_ids": torch.zeros(3, 5, dtype=torch.long)}, None)
    run.observer.clock.step_ends(torch.device("cpu"))
    speed = run.outcome()["speed"]
    assert speed["samples_per_second"] * speed["step_seconds_median"] == pytest.approx(3 * replicas)
    assert speed["tokens_per_second"] * speed["step_seconds_median"] == pytest.approx(15 * replicas)


def test_a_warm_up_of_one_step_measures_the_steady_state_all_the_same(tmp_path: Path) -> None:
    """Forward and backward, where this model has its peak, have no optimizer states beside them in the first step."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 1, "n_positions": 8, "vocab_size": 256}
    data = {"num_samples": 64, "sequence_length": 8, "vocab_size": 256, "batch_size": 16}
    base = {
        "model": {"class_path": "lightning_memfit.models.CausalLM", "init_args": {"config": config}},
        "data": {"class_path": "lightning_memfit.data.RandomTokens", "init_args": data},
    }
    document = {"title": "T", "base": base, "rows": {"plain": {}}, "measure": {"warmup_steps": 1, "timed_steps": 1}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(document))
    [row] = load_experiment(tmp_path / "mine.yaml", "full", "cpu", read_recipe).rows
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(row.settings))
    (tmp_path / "job.json").write_text(json.dumps(job_of(row, None)))
    run = _Run(tmp_path)
    run.fit()
    outcome = run.outcome()
    assert outcome["speed"]["timed_steps"] == 1
    assert outcome["measured"]["by_category"]["optimizer_state"] > 0
    assert outcome["predicted"]["allocated_bytes"] == pytest.approx(outcome["measured"]["allocated_bytes"], rel=0.01)
