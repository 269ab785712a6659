"""Under ZeRO, parameters without dimensions and Adagrad's groups train, resume and evaluate as under DDP."""

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
MODULES = ["Scaled", "TwoGroups", "Partly"]
UNUSED = {
    "class_path": "lightning.pytorch.strategies.DDPStrategy",
    "init_args": {"process_group_backend": "gloo", "find_unused_parameters": True},
}
TRAINED = {"Sometimes": 4, "Clamped": 4, "Gathered": 4, "Halved": 2, "Penalized": 2}
"""Modules, and for how many steps they are trained."""

IN_PARTS = ("stage_3", "small_pieces")
PLAINLY = {"Gathered": "Clamped"}
WORDS = {
    "Sometimes": "takes part in an earlier batch",
    "Clamped": "which ZeRO-3 has put away",
    "Penalized": "which ZeRO-3 has put away",
    "Halved": "reads the gradient of `scale`",
}
MAY_REFUSE = {"Clamped": IN_PARTS, "Penalized": IN_PARTS, "Halved": tuple(STRATEGIES), "Sometimes": ("stage_1",)}


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
    asked = selected(request, test_what_a_step_or_hook_does_beside_takes_effect_or_is_refused.__name__)
    trained = {(of["module"], of["name"], of["accumulate"]) for of in asked}
    trained |= {(PLAINLY.get(module, module), "ddp", accumulate) for module, _, accumulate in trained}
    for module, name, accumulate in sorted(trained):
        case = {"devices": 2, "module": module, "steps": TRAINED[module], "accumulate": accumulate}
        chosen = UNUSED if name == "ddp" else STRATEGIES[name]
        case |= {"strategy": chosen, "scenario": "tests.helpers.strategy_modules.train_only"}
        cases[f"{module}/{name}/{accumulate}"] = case | {"expect_error": name in MAY_REFUSE.get(module, ())}
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
@pytest.mark.parametrize("module", TRAINED)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_step_or_hook_does_beside_takes_effect_or_is_refused(results, module, name, accumulate):
    found = results[f"{module}/{name}/{accumulate}"]
    expected = results[f"{PLAINLY.get(module, module)}/ddp/{accumulate}"]
    if "error" in found:
        assert WORDS[module] in found["error"]
        assert name in MAY_REFUSE.get(module, ())
        return
    assert module != "Halved"
    assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6, rel=0)
    assert found["left"] == []
