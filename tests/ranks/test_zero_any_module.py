"""Under ZeRO, several groups and weights that no group has train, resume and evaluate as under DDP."""

import pytest

from tests.helpers.strategy_launch import launch, selected

pytest.importorskip("deepspeed")

STRATEGIES = {
    "ddp": "memfit_ddp",
    "stage_1": "memfit_zero_1",
    "stage_2": "memfit_zero_2",
    "stage_3": "memfit_zero_3",
    "offload": "memfit_zero_offload",
    "small_pieces": {
        "class_path": "lightning_memfit.strategies.ZeroStrategy",
        "init_args": {"stage": 3, "sub_group_size": 500, "bucket_size": 500},
    },
}
MODULES = ["TwoGroups", "Partly"]
UNUSED = {
    "class_path": "lightning.pytorch.strategies.DDPStrategy",
    "init_args": {"process_group_backend": "gloo", "find_unused_parameters": True},
}
STEPS = 4


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder, cases = tmp_path_factory.mktemp("zero-any-module"), {}
    asked = selected(request, test_it_trains_and_resumes_as_under_ddp.__name__)
    resumed = {(of["module"], name) for of in asked for name in (of["name"], "ddp")}
    for module, name in sorted(resumed):
        inside = folder / module / name
        inside.mkdir(parents=True)
        case = {"strategy": STRATEGIES[name], "devices": 2, "module": module, "folder": str(inside)}
        cases[f"{module}/{name}"] = case | {"scenario": "tests.helpers.strategy_modules.save_and_resume"}
    asked = selected(request, test_a_layer_that_some_batches_leave_out.__name__)
    trained = {(name, of["accumulate"]) for of in asked for name in (of["name"], "ddp")}
    for name, accumulate in sorted(trained):
        case = {"devices": 2, "module": "Sometimes", "steps": STEPS, "accumulate": accumulate}
        chosen = UNUSED if name == "ddp" else STRATEGIES[name]
        case |= {"strategy": chosen, "scenario": "tests.helpers.strategy_modules.train_only"}
        cases[f"{name}/{accumulate}"] = case
    return launch(folder, cases)


@pytest.mark.nightly_cases("small_pieces-")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "ddp"])
def test_it_trains_and_resumes_as_under_ddp(results, module, name):
    found, expected = results[f"{module}/{name}"], results[f"{module}/ddp"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6, rel=0)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-6, rel=0)
    assert expected["losses"][-1] < expected["losses"][0]
    assert found["missing"] == []


@pytest.mark.nightly_cases("1-")
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "ddp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_layer_that_some_batches_leave_out(results, name, accumulate):
    found, expected = results[f"{name}/{accumulate}"], results[f"ddp/{accumulate}"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6, rel=0)
    assert found["left"] == []
