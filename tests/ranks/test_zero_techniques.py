"""Techniques under ZeRO: right, or refused with the reason and what to do. And two machines, started by torchrun."""

import socket
import sys

import pytest

from tests.helpers.strategy_launch import finish, launch, start
from tests.helpers.strategy_runs import CLIP

pytest.importorskip("deepspeed")

ZERO = ("memfit_zero_1", "memfit_zero_2", "memfit_zero_3", "memfit_zero_offload")
EIGHT_BIT = "lightning_memfit.techniques.optimizer_8bit.Optimizer8bit"
CHUNKED = {"class_path": "lightning_memfit.techniques.chunked_loss.ChunkedLoss"}
LORA = {"class_path": "lightning_memfit.techniques.lora.Lora"}
QUANTIZED = {"class_path": "lightning_memfit.techniques.quantized_weights.QuantizedWeights"}
CALLBACKS = {
    "optimizer_8bit": {"class_path": EIGHT_BIT, "init_args": {"keep_32bit_embeddings": False, "min_8bit_size": 1}},
    "checkpointing": {"class_path": "lightning_memfit.techniques.activation_checkpointing.ActivationCheckpointing"},
    "chunked_loss": CHUNKED,
    "tiled_mlp": {"class_path": "lightning_memfit.TiledMLP", "init_args": {"num_tiles": 3}},
}
TOLERANCE = {
    "optimizer_8bit": 1e-3,
    "checkpointing": 2e-6,
    "chunked_loss": 2e-6,
    "tiled_mlp": 2e-6,
}  # 8 bits: quantized moments
WORKING = [(s, c) for s in ZERO for c in CALLBACKS if (s, c) != ("memfit_zero_3", "chunked_loss")]
REFUSED = {
    "8-bit embeddings": ("memfit_zero_2", [{"class_path": EIGHT_BIT}], "Set `keep_32bit_embeddings: false`"),
    "chunked loss": ("memfit_zero_3", [CHUNKED], "`memfit_zero_2` or `memfit_fsdp2`"),
    "quantized weights": ("memfit_zero_3", [QUANTIZED, LORA], "can't divide weights in 4 or 8 bits"),
    "gradient release": (
        "memfit_zero_2",
        [{"class_path": "lightning_memfit.techniques.gradient_release.GradientRelease"}],
        "leave GradientRelease out",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    cases = {
        f"{strategy}/{name}": {"strategy": strategy, "devices": 2, "callbacks": [CALLBACKS[name]]}
        for strategy, name in WORKING
    }
    for name, (strategy, callback, _) in REFUSED.items():
        cases[name] = {"strategy": strategy, "devices": 2, "callbacks": callback, "expect_error": True}
    return launch(tmp_path_factory.mktemp("zero-techniques"), cases)


@pytest.mark.parametrize(("strategy", "name"), WORKING)
def test_losses_stay_those_of_plain_torch(results, strategy, name):
    result = results[f"{strategy}/{name}"]
    assert result["losses"] == pytest.approx(result["plain"], abs=TOLERANCE[name], rel=0)


@pytest.mark.parametrize("strategy", ZERO)
def test_8_bit_states_are_in_use(results, strategy):
    result = results[f"{strategy}/optimizer_8bit"]
    assert max(abs(a - b) for a, b in zip(result["losses"], result["plain"], strict=True)) > 3e-6


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(results, name):
    assert REFUSED[name][2] in results[name]["error"]


@pytest.mark.nightly
def test_two_machines_started_by_torchrun(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cases = {
        strategy: {"strategy": strategy, "num_nodes": 2, "accumulate": 2, "clip": CLIP}
        for strategy in ("memfit_ddp", "memfit_fsdp2", "memfit_zero_2", "memfit_zero_3")
    }
    machines = []
    for node in range(2):
        options = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1"]
        options += ["--master_addr=127.0.0.1", f"--master_port={port}"]
        machines.append(start(tmp_path, cases, sys.executable, "-m", "torch.distributed.run", *options))
    for result in finish(tmp_path, *machines).values():
        assert result["losses"] == pytest.approx(result["plain"], abs=1e-6, rel=0)
