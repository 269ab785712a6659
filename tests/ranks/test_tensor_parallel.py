"""Ranks that compute one model together train it as plain torch AdamW does, over gloo on 2 and on 2 x 2 ranks.

Tolerances are absolute, on losses of about 4.5 in fp32: 2e-6, as sums over ranks are in another order.
"""

import pytest
import torch

from tests.helpers.strategy_launch import launch
from tests.helpers.strategy_runs import BATCH, CLIP, CONFIG, Tokens
from tests.helpers.strategy_scenarios import evaluate_whole

SCENARIOS, OURS = "tests.helpers.strategy_scenarios", "tests.helpers.tensor_parallel_scenarios"
DROPOUT = CONFIG | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
OPT = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_dim": 64}
CALLBACKS = {
    "checkpointing": {
        "class_path": "lightning_memfit.techniques.activation_checkpointing.ActivationCheckpointing",
        "init_args": {"mode": "full"},
    },
    "keeping attention": {
        "class_path": "lightning_memfit.techniques.activation_checkpointing.ActivationCheckpointing",
        "init_args": {"mode": "selective", "keep": ["attention"]},
    },
    "chunked loss": {"class_path": "lightning_memfit.techniques.chunked_loss.ChunkedLoss"},
    "micro-batching": {"class_path": "lightning_memfit.fitting.MicroBatching", "init_args": {"micro_batch_size": 1}},
}


def together(size=2, **options):
    init_args = {"tensor_parallel_size": size, **options}
    strategy = {"class_path": "lightning_memfit.strategies.FullyShardedStrategy", "init_args": init_args}
    return {"strategy": strategy, "together": size, "devices": 2}


STEPS = {**together(), "accumulate": 2, "clip": CLIP}
TRAINED = {
    "gpt2": STEPS,
    **{name: {**together(), "callbacks": [callback]} for name, callback in CALLBACKS.items()},
}
REFUSED = {
    "ranks": (together(3), "`tensor_parallel_size=3` must divide the 2 ranks"),
    "sharding": (together(sharding_size=1), "must be a multiple of `tensor_parallel_size=2`"),
    "heads": (
        {**together(), "module": {"config": CONFIG | {"n_head": 1}}},
        "`tensor_parallel_size=2` can't divide the 1 heads of model.transformer.h.0.attn. Take a divisor",
    ),
    "architecture": (
        {**together(), "module": {"config": OPT}},
        "model.model.decoder.layers.0 (OPTDecoderLayer) is none",
    ),
    "adapters": (
        {**together(), "callbacks": [{"class_path": "lightning_memfit.techniques.lora.Lora"}]},
        "which adapters don't follow",
    ),
    "8 bits": (
        {**together(), "callbacks": [{"class_path": "lightning_memfit.techniques.optimizer_8bit.Optimizer8bit"}]},
        "bitsandbytes can't step what ModelParallelStrategy shards",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def results(folder):
    cases = TRAINED | {f"refused {name}": case | {"expect_error": True} for name, (case, _) in REFUSED.items()}
    cases["bf16"] = {**together(), "precision": "bf16-mixed"}
    for scenario in ("save", "resume", "validate", "fit_twice"):
        cases[scenario] = {**together(), "scenario": f"{SCENARIOS}.{scenario}", "folder": str(folder)}
    for scenario in ("pieces", "logits"):
        (folder / scenario).mkdir()
        cases[scenario] = {**together(), "scenario": f"{OURS}.{scenario}", "folder": str(folder / scenario)}
    cases["dropout"] = together() | {
        "scenario": f"{OURS}.dropout_with_other_seeds",
        "module": {"config": DROPOUT},
    }
    return launch(folder, cases)


@pytest.fixture(scope="module")
def on_one(folder, results):
    """What FSDP2 on one device makes of the same samples, and of the checkpoint that two ranks wrote together."""
    (folder / "alone").mkdir()
    cases = {"bf16": {"strategy": "memfit_fsdp2", "precision": "bf16-mixed"}}
    for scenario in ("save", "resume", "validate", "fit_twice"):
        case = {"strategy": "memfit_fsdp2", "scenario": f"{SCENARIOS}.{scenario}"}
        cases[scenario] = case | {"folder": str(folder / "alone")}
    cases["resume theirs"] = {"strategy": "memfit_fsdp2", "scenario": f"{SCENARIOS}.resume", "folder": str(folder)}
    return launch(folder, cases)


def close(values, tolerance=2e-6):
    return pytest.approx(values, abs=tolerance, rel=0)


@pytest.mark.parametrize("name", TRAINED)
def test_losses_are_those_of_plain_torch(results, name):
    assert results[name]["losses"] == close(results[name]["plain"])
    assert results[name]["losses"][-1] < results[name]["losses"][0] - 0.3


@pytest.mark.nightly
def test_two_by_two_ranks_train_as_plain_torch(tmp_path):
    case = {**together(sharding_size=2), "devices": 4, "accumulate": 2, "clip": CLIP}
    found = launch(tmp_path, {"hybrid": case})["hybrid"]
    assert found["losses"] == close(found["plain"])


@pytest.mark.nightly
def test_mixed_precision_is_that_of_one_device(results, on_one):
    assert results["bf16"]["losses"] == close(on_one["bf16"]["losses"], 1e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_right_is_refused(results, name):
    assert REFUSED[name][1] in results[f"refused {name}"]["error"]


@pytest.mark.parametrize("scenario", ["save", "resume", "validate", "fit_twice"])
def test_checkpoints_and_evaluation_are_those_of_one_device(results, on_one, scenario):
    for key, value in results[scenario].items():
        if key not in ("left", "predicted"):
            assert value == close(on_one[scenario][key])


def test_a_checkpoint_goes_on_on_one_device(results, on_one):
    assert on_one["resume theirs"]["losses"] == close(results["resume"]["losses"])


@pytest.mark.nightly
def test_a_checkpoint_of_one_device_goes_on_together(results, on_one, folder):
    case = {**together(), "scenario": f"{SCENARIOS}.resume", "folder": str(folder / "alone")}
    assert launch(folder, {"resume": case})["resume"]["losses"] == close(results["resume"]["losses"])


def test_consolidated_weights_evaluate_alike(results, folder):
    assert evaluate_whole(str(folder / "half.ckpt"), ranks=1) == close(results["save"]["val_loss"])


def test_the_exported_model_has_equal_logits(results, folder):
    from transformers import AutoModelForCausalLM

    from lightning_memfit.models.trained import export_folder, network_from_checkpoint
    from lightning_memfit.strategies.checkpoint_io import consolidated

    network = network_from_checkpoint(consolidated(folder / "logits" / "half.ckpt"))
    exported = AutoModelForCausalLM.from_pretrained(export_folder(network, folder / "exported", None)).eval()
    with torch.no_grad():
        found = exported(torch.stack([Tokens()[index]["input_ids"] for index in range(BATCH)])).logits
    torch.testing.assert_close(found, torch.load(folder / "logits" / "logits.pt"), atol=2e-6, rtol=0)


def test_every_matrix_is_divided(results):
    sizes = results["pieces"]["sizes"]
    assert sizes.keys() == results["pieces"]["states"].keys()
    for name, (whole, own) in sizes.items():
        is_matrix = name.endswith("weight") and ".ln_" not in name
        divided = is_matrix or name.endswith("c_fc.bias")
        assert own == (whole // 2 if divided else whole), name
        assert results["pieces"]["states"][name] == own


def test_dropout_is_the_same_on_ranks_that_compute_together(results):
    first, second = results["dropout"]["losses"]
    assert first == second
    assert len(set(first)) == 4
