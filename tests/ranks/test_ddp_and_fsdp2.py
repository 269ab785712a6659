"""DDP and FSDP2 over gloo train as plain torch AdamW does, hybrid sharding and the techniques included.

Tolerances are absolute, on losses of about 4.5 in fp32: 1e-6, and 2e-6 where a technique adds up in another order.
"""

import pytest
import torch

from tests.helpers.strategy_launch import launch
from tests.helpers.strategy_runs import CLIP
from tests.helpers.strategy_scenarios import evaluate_whole

SCENARIOS = "tests.helpers.strategy_scenarios"
CALLBACKS = {
    "checkpointing": {
        "class_path": "lightning_memfit.techniques.activation_checkpointing.ActivationCheckpointing",
        "init_args": {"mode": "selective", "keep": ["attention"]},
    },
    "chunked_loss": {"class_path": "lightning_memfit.techniques.chunked_loss.ChunkedLoss"},
    "tiled_mlp": {"class_path": "lightning_memfit.TiledMLP", "init_args": {"num_tiles": 3}},
    "micro_batching": {"class_path": "lightning_memfit.fitting.MicroBatching", "init_args": {"micro_batch_size": 1}},
}


def fsdp2(**options):
    return {"class_path": "lightning_memfit.strategies.FullyShardedStrategy", "init_args": options}


STRATEGIES = {
    "ddp": "memfit_ddp",
    "fsdp2": "memfit_fsdp2",
    "fsdp2_hybrid": fsdp2(sharding_size=1),
    "fsdp2_gathered": fsdp2(reshard_after_forward=False),
}
TRAINED = {
    name: {"strategy": strategy, "devices": 2, "accumulate": 2, "clip": CLIP} for name, strategy in STRATEGIES.items()
}
WITH_TECHNIQUE = {
    f"{name}/{technique}": {"strategy": STRATEGIES[name], "devices": 2, "callbacks": [callback]}
    for name in ("ddp", "fsdp2")
    for technique, callback in CALLBACKS.items()
}
HALF = {f"{name}/bf16": {"strategy": STRATEGIES[name], "devices": 2, "precision": "bf16-mixed"} for name in STRATEGIES}
IN_HALF = {
    f"fsdp2/in half/{len(callbacks)}": {
        "strategy": fsdp2(gather_dtype="bfloat16"),
        "devices": 2,
        "precision": "bf16-mixed",
        "callbacks": callbacks,
    }
    for callbacks in ([], [CALLBACKS["checkpointing"]])
}
PLAIN = {
    f"{name}/plain/{calls}": {
        "strategy": STRATEGIES[name],
        "devices": 2,
        "calls": calls,
        "scenario": "tests.helpers.strategy_modules.train",
    }
    for name in ("ddp", "fsdp2")
    for calls in ("itself", "network", "layers", "by hand")
}
WAYS = ["one step", "two steps", "two passes", "two optimizers", "closures"]
UNUSED = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"find_unused_parameters": True}}
BY_HAND = {
    f"{name}/by_hand/{way}": {
        "strategy": UNUSED if name == "ddp" else STRATEGIES[name],
        "devices": 2,
        "module": "ByHand",
        "calls": way,
        "scenario": "tests.helpers.strategy_modules.train",
    }
    for name in ("ddp", "fsdp2")
    for way in WAYS
}
MODULES = "tests.helpers.strategy_modules"
REFUSED = {
    "flat": {"module": "ByHand", "calls": "flat", "scenario": f"{MODULES}.train"},
}
WRONG = {"strategy": fsdp2(sharding_size=3), "devices": 2, "expect_error": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data-parallel")


@pytest.fixture(scope="module")
def results(folder):
    cases = TRAINED | WITH_TECHNIQUE | HALF | IN_HALF | PLAIN | BY_HAND | {"wrong": WRONG}
    for name, case in REFUSED.items():
        cases[name] = {"strategy": "memfit_fsdp2", "devices": 2, "expect_error": True} | case
    for name in ("ddp", "fsdp2"):
        (folder / name).mkdir()
        for scenario in ("save", "resume", "validate", "fit_twice"):
            case = {"strategy": STRATEGIES[name], "devices": 2, "scenario": f"{SCENARIOS}.{scenario}"}
            cases[f"{name}/{scenario}"] = case | {"folder": str(folder / name)}
    return launch(folder, cases)


def close(values, tolerance=2e-6):
    return pytest.approx(values, abs=tolerance, rel=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_are_those_of_plain_torch(results, name):
    assert results[name]["losses"] == close(results[name]["plain"], 1e-6)
    assert len(results[name]["losses"]) == 8


@pytest.mark.parametrize("name", WITH_TECHNIQUE)
def test_techniques_change_nothing(results, name):
    assert results[name]["losses"] == close(results[name]["plain"])


@pytest.mark.parametrize("calls", ["itself", "network", "layers", "by hand"])
def test_any_module_is_sharded_whatever_its_step_calls(results, calls):
    expected, found = results[f"ddp/plain/{calls}"], results[f"fsdp2/plain/{calls}"]
    assert len(found["losses"]) == 6
    assert found["losses"] == close(expected["losses"])
    assert found["val_loss"] == close(expected["val_loss"])
    assert found["left"] == []


@pytest.mark.parametrize("way", WAYS)
def test_steps_by_hand_are_those_of_ddp(results, way):
    expected, found = results[f"ddp/by_hand/{way}"], results[f"fsdp2/by_hand/{way}"]
    assert found["losses"] == close(expected["losses"])
    assert found["val_loss"] == close(expected["val_loss"])
    assert len(set(found["losses"])) >= 6


def test_what_would_be_lost_is_refused(results):
    assert "`LBFGS` would give other weights" in results["flat"]["error"]


@pytest.mark.parametrize("name", HALF)
def test_mixed_precision_is_that_of_ddp(results, name):
    assert results[name]["losses"] == close(results["ddp/bf16"]["losses"], 2e-4)


def test_weights_gathered_in_half_precision_train_as_those_of_autocast(results):
    """Norms and embeddings compute in half precision, too, which autocast leaves in fp32."""
    plain, recomputed = (results[name]["losses"] for name in IN_HALF)
    assert plain == close(results["ddp/bf16"]["losses"], 2e-3)
    assert plain == recomputed


@pytest.mark.parametrize("scenario", ["save", "resume", "validate", "fit_twice"])
def test_checkpoints_and_evaluation_are_those_of_ddp(results, scenario):
    for key, value in results[f"fsdp2/{scenario}"].items():
        expected = results[f"ddp/{scenario}"][key]
        assert value == (close(expected) if key not in ("left", "predicted") else expected)


def test_resuming_sharded_on_another_number_of_ranks(results, folder):
    cases = {
        name: {"strategy": STRATEGIES[name], "scenario": f"{SCENARIOS}.resume", "folder": str(folder / name)}
        for name in ("ddp", "fsdp2")
    }
    resumed = launch(folder, cases)
    assert resumed["fsdp2"]["losses"] == close(resumed["ddp"]["losses"])


def test_consolidated_weights_evaluate_alike(results, folder):
    assert evaluate_whole(str(folder / "fsdp2" / "half.ckpt"), ranks=2) == close(results["ddp/save"]["val_loss"])
    assert torch.distributed.is_initialized() is False


def test_a_sharding_size_that_does_not_divide_the_ranks_is_refused(results):
    assert "`sharding_size=3` must divide the 2 ranks" in results["wrong"]["error"]
