"""What a recipe itself chooses, as a setting to compare plans with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli import plan_recipe
from cli.recipe_run import RecipeRun
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit


def recipe(strategy: Any = "auto", devices: int | None = 1, precision: Any = "bf16-mixed") -> RecipeRun:
    batch, options = {"x": torch.zeros(4, 2)}, StepOptions(precision, 2)
    made: Any = SimpleNamespace
    return RecipeRun(made(), batch, options, (Optimizer8bit(),), "auto", strategy, devices, 1, (made(), made()))


def test_one_device() -> None:
    setting, reason = plan_recipe.own_setting(recipe(), 8)
    assert setting is not None
    assert setting.to_dict() == {
        "micro_batch_size": 4,
        "accumulate_grad_batches": 2,
        "world_size": 1,
        "techniques": {"optimizer_8bit": {}, "bf16_mixed": {}},
    }
    assert reason == ""


def test_all_devices_are_taken_by_ddp() -> None:
    setting, _ = plan_recipe.own_setting(recipe(devices=None), 8)
    assert setting is not None
    assert setting.world_size == 8
    assert setting.has("ddp")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"strategy": "no_such_strategy", "devices": 2}, "no_such_strategy"),
        ({"strategy": {"class_path": "no_such_module.Strategy"}}, "no_such_module"),
        ({"strategy": {"class_path": "lightning.pytorch.strategies.NoSuchStrategy"}}, "NoSuchStrategy"),
        ({"precision": "16-true"}, "16-true"),
    ],
)
def test_what_no_record_describes_gives_the_reason(changed: dict[str, Any], message: str) -> None:
    setting, reason = plan_recipe.own_setting(recipe(**changed), 1)
    assert setting is None
    assert message in reason
