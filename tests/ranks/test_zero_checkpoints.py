"""Saving, resuming, evaluating and exporting under every ZeRO stage: the numbers are those of DDP."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.strategy_launch import launch

pytest.importorskip("deepspeed")

STRATEGIES = {
    "ddp": "ddp",
    "stage_1": "memfit_zero_1",
    "stage_2": "memfit_zero_2",
    "stage_3": "memfit_zero_3",
    "stage_3_offload": {
        "class_path": "lightning_memfit.strategies.ZeroStrategy",
        "init_args": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    },
}
SHARDED = [name for name in STRATEGIES if name != "ddp"]
SCENARIOS = "tests.helpers.strategy_scenarios"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zero-checkpoints")


@pytest.fixture(scope="module")
def results(folder):
    cases = {}
    for name, strategy in STRATEGIES.items():
        (folder / name).mkdir()
        for scenario in ("save", "resume", "validate", "fit_twice"):
            case = {"strategy": strategy, "devices": 2, "scenario": f"{SCENARIOS}.{scenario}"}
            cases[f"{name}/{scenario}"] = case | {"folder": str(folder / name)}
    return launch(folder, cases)


def close(values):
    return pytest.approx(values, abs=2e-6, rel=0)


@pytest.mark.parametrize("name", SHARDED)
def test_resuming_goes_on_with_the_optimizer_s_states(results, name):
    resumed = results[f"{name}/resume"]["losses"]
    assert resumed == close(results["ddp/resume"]["losses"])
    # A run that had lost its moments would be here:
    assert abs(resumed[-1] - results["ddp/fit_twice"]["second"][-1]) > 0.01


@pytest.mark.parametrize("name", SHARDED)
def test_a_second_fit_starts_a_new_optimizer(results, name):
    assert results[f"{name}/fit_twice"] == {key: close(values) for key, values in results["ddp/fit_twice"].items()}


@pytest.mark.parametrize("name", SHARDED)
def test_evaluation_after_training_and_from_a_checkpoint(results, name):
    saved, plain = results[f"{name}/save"], results["ddp/save"]
    assert saved["val_loss"] == saved["test_loss"] == close(plain["val_loss"])
    assert saved["predicted"] == plain["predicted"]
    assert results[f"{name}/validate"]["val_loss"] == close(plain["val_loss"])


@pytest.mark.parametrize("name", SHARDED)
def test_a_path_saved_twice_holds_one_checkpoint(results, name):
    assert results[f"{name}/save"]["left"] == ["half.ckpt"]


@pytest.mark.parametrize("name", SHARDED)
def test_consolidated_weights_evaluate_alike(results, folder, name):
    from tests.helpers.strategy_scenarios import evaluate_whole

    assert evaluate_whole(str(folder / name / "half.ckpt"), ranks=2) == close(results["ddp/save"]["val_loss"])


@pytest.mark.parametrize("name", ["stage_2", "stage_3"])
def test_export_gives_a_hugging_face_folder(results, folder, name, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    from cli.main import main
    from lightning_memfit.strategies.checkpoint_io import consolidated

    source, target = folder / name / "half.ckpt", tmp_path / "exported"
    arguments = ["export", "--ckpt_path", str(source), "--folder", str(target), "--tokenizer", "bytes"]
    assert main(arguments) == 0, capsys.readouterr().err
    weights = consolidated(source)["state_dict"]["model.transformer.wte.weight"]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(target).transformer.wte.weight, weights)
    assert json.loads((target / "config.json").read_text())["n_layer"] == 2


def test_consolidating_something_else_is_refused(tmp_path: Path):
    from lightning_memfit.strategies.checkpoint_io import consolidated

    with pytest.raises(ValueError, match="no sharded checkpoint"):
        consolidated(tmp_path)


MOVES = [
    ("ddp", "ddp"),
    ("stage_1", "stage_1"),
    ("stage_2", "stage_2"),
    ("stage_1", "stage_2"),
    ("stage_3", "stage_3"),
    ("stage_3_offload", "stage_3_offload"),
]
REFUSED = [("stage_2", "stage_3"), ("stage_3", "stage_2"), ("stage_3", "ddp"), ("ddp", "stage_2")]
REFUSED += [("stage_2", "fsdp2"), ("ddp", "fsdp2")]
SINGLE = {"ddp": "memfit_ddp", "fsdp2": "memfit_fsdp2"}


@pytest.fixture(scope="module", params=[1, 3])
def on_other_ranks(request, results, folder):
    """What two ranks saved, resumed on one and on three."""
    cases = {}
    for source, target in MOVES:
        case = {"strategy": SINGLE.get(target) or STRATEGIES[target], "devices": request.param}
        cases[f"{source}/{target}"] = case | {"scenario": f"{SCENARIOS}.resume", "folder": str(folder / source)}
    return launch(folder, cases)


@pytest.mark.parametrize(("source", "target"), MOVES[1:])
def test_resuming_on_another_number_of_ranks_is_exact(on_other_ranks, source, target, folder):
    assert on_other_ranks[f"{source}/{target}"]["losses"] == close(on_other_ranks["ddp/ddp"]["losses"])
    assert [one.name for one in (folder / source).iterdir()] == ["half.ckpt"]


@pytest.fixture(scope="module")
def refused(results, folder):
    """What one strategy saved, resumed under another one."""
    cases = {}
    for source, target in REFUSED:
        case = {"strategy": SINGLE.get(target) or STRATEGIES[target], "folder": str(folder / source)}
        cases[f"{source}/{target}"] = case | {"scenario": f"{SCENARIOS}.resume", "expect_error": True}
    return launch(folder, cases)


@pytest.mark.parametrize(("source", "target"), REFUSED)
def test_optimizer_states_of_another_strategy_are_refused_with_what_to_do(refused, source, target):
    error = refused[f"{source}/{target}"]["error"]
    assert "half.ckpt" in error
    assert "optimizer states" in error
    assert "memfit export" in error


ELSEWHERE = [("stage_2", "stage_3"), ("stage_3", "stage_2"), ("stage_3", "memfit_ddp"), ("stage_1", "memfit_ddp")]


@pytest.fixture(scope="module")
def elsewhere(results, folder):
    """What one strategy saved, evaluated under another on one rank."""
    cases = {}
    for source, target in ELSEWHERE:
        case = {"strategy": STRATEGIES.get(target, target), "folder": str(folder / source)}
        cases[f"{source}/{target}"] = case | {"scenario": f"{SCENARIOS}.validate_all", "ranks": 2}
    return launch(folder, cases)


@pytest.mark.parametrize(("source", "target"), ELSEWHERE)
def test_any_strategy_evaluates_what_any_other_saved(elsewhere, results, source, target):
    assert elsewhere[f"{source}/{target}"]["val_loss"] == close(results["ddp/save"]["val_loss"])
