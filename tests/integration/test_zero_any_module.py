"""Under ZeRO, parameters without dimensions and Adagrad's groups train, resume and evaluate as under DDP."""

import pytest

from tests.helpers.strategy_launch import launch

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

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
MODULES = ["Scaled", "TwoGroups"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, cases = tmp_path_factory.mktemp("zero-any-module"), {}
    for module in MODULES:
        for name, strategy in STRATEGIES.items():
            inside = folder / module / name
            inside.mkdir(parents=True)
            case = {"strategy": strategy, "devices": 2, "module": module, "folder": str(inside)}
            cases[f"{module}/{name}"] = case | {"scenario": "tests.helpers.strategy_modules.save_and_resume"}
    return launch(folder, cases)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "ddp"])
def test_it_trains_and_resumes_as_under_ddp(results, module, name):
    found, expected = results[f"{module}/{name}"], results[f"{module}/ddp"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6, rel=0)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-6, rel=0)
    assert expected["losses"][-1] < expected["losses"][0]
