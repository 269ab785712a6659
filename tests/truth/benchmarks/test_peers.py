"""Every peer trains what Lightning trains: the same losses, and memory that adds up."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.peers.peer import PEERS, Peer, peer_named
from benchmarks.peers.run import PeerRun
from lightning_memfit.bench.record import UnsupportedError
from lightning_memfit.memory import Category

from .test_peer_task import SETTINGS, changed

WARMUP = 2
FP32_BYTES = 4


def run_peer(folder: Path, peer: str, options: dict[str, Any], settings: dict[str, Any] = SETTINGS) -> dict[str, Any]:
    """Train in this process."""
    folder.mkdir(exist_ok=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "job.json").write_text(json.dumps({"peer": peer, "options": options, "warmup_steps": WARMUP}))
    run = PeerRun(folder)
    run.fit()
    return run.outcome()


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_peer(tmp_path_factory.mktemp("lightning"), "lightning", {})


def check(outcome: dict[str, Any], lightning: dict[str, Any]) -> None:
    assert outcome["loss_first"] == pytest.approx(lightning["loss_first"], rel=1e-6)
    assert outcome["loss_last"] == pytest.approx(lightning["loss_last"], rel=1e-5)
    assert outcome["speed"]["timed_steps"] == SETTINGS["trainer"]["max_steps"] - WARMUP
    assert outcome["speed"]["samples_per_second"] == pytest.approx(4 / outcome["speed"]["step_seconds_median"])
    measured, before = outcome["measured"], lightning["measured"]["by_category"]
    assert sum(measured["by_category"].values()) == measured["allocated_bytes"]
    for category in (Category.PARAMETER, Category.OPTIMIZER_STATE):
        assert measured["by_category"][category] == pytest.approx(before[category], rel=0.02)


def test_plain_lightning_counts_weights_gradients_and_states(lightning: dict[str, Any]) -> None:
    check(lightning, lightning)
    by_category = lightning["measured"]["by_category"]
    weights = by_category[Category.PARAMETER]
    assert weights == by_category[Category.GRADIENT]
    assert by_category[Category.OPTIMIZER_STATE] == pytest.approx(2 * weights, rel=0.05)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers.Trainer needs accelerate")
def test_the_hugging_face_trainer_trains_the_same(lightning: dict[str, Any], tmp_path: Path) -> None:
    check(run_peer(tmp_path, "hf_trainer", {"optim": "adamw_torch"}), lightning)
    assert lightning["measured"]["rss_growth_bytes"] is None or sys.platform == "linux"


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_the_hand_written_loop_trains_the_same(lightning: dict[str, Any], tmp_path: Path) -> None:
    check(run_peer(tmp_path, "torchao", {"optimizer": "torch.optim.AdamW"}), lightning)


@pytest.mark.parametrize("options", [{}, {"checkpoint": "transformer.h"}], ids=["plain", "checkpointed"])
def test_a_loop_with_torch_alone_trains_the_same(
    options: dict[str, Any], lightning: dict[str, Any], tmp_path: Path
) -> None:
    check(run_peer(tmp_path, "torch", options), lightning)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_trains_the_same(lightning: dict[str, Any], tmp_path: Path) -> None:
    """In a process of its own, and without its shared-memory collectives, which it compiles for minutes."""
    code = (
        "import json, sys; from pathlib import Path; import os; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "from lightning_memfit.strategies.upstream.deepspeed import disable_shared_memory_collectives\n"
        "from tests.truth.benchmarks.test_peers import run_peer\n"
        "disable_shared_memory_collectives()\n"
        "folder = Path(sys.argv[1])\n"
        "outcome = run_peer(folder, 'deepspeed', {'zero_optimization': {'stage': 0}})\n"
        "(folder / 'outcome.json').write_text(json.dumps(outcome))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=240)
    check(json.loads((tmp_path / "outcome.json").read_text()), lightning)


def test_what_a_peer_is_told_shows(lightning: dict[str, Any], tmp_path: Path) -> None:
    saved = run_peer(tmp_path, "lightning", {"optimizer": "torch.optim.SGD"})
    assert Category.OPTIMIZER_STATE not in saved["measured"]["by_category"]
    assert saved["measured"]["allocated_bytes"] < lightning["measured"]["allocated_bytes"]


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`options` of peer '\w+'.*'optimiser'"):
        run_peer(tmp_path, "torch", {"optimiser": "x"})


def test_an_optimizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`options.optimizer=torch.optim.AdamX` can't be imported"):
        run_peer(tmp_path, "lightning", {"optimizer": "torch.optim.AdamX"})


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_what_needs_a_gpu_is_unsupported_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="it needs CUDA"):
        run_peer(tmp_path, "torchao", {"optimizer": "torchao.optim.CPUOffloadOptimizer"})


def test_a_missing_package_is_named() -> None:
    with pytest.raises(UnsupportedError, match="This peer needs no_such_package: `pip install it`"):
        Peer(("no_such_package",), "it", lambda *_: None).require()


def test_every_name_has_a_peer() -> None:
    for name in PEERS:
        assert isinstance(peer_named(name), Peer)


def test_deepspeed_is_given_the_task_and_the_rows_words(tmp_path: Path) -> None:
    from benchmarks.peers.deepspeed_by_hand import configuration
    from benchmarks.peers.task import Task

    options = {"gradient_checkpointing": True, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    config = configuration(Task(changed("trainer.precision", "bf16-mixed"), tmp_path), options)
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    assert options["optimizer"] == {"type": "AdamW"}
    assert config["bf16"] == {"enabled": True}
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 2)
    assert config["gradient_clipping"] == 0.0
    assert "gradient_checkpointing" not in config
