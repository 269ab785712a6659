"""What a plan's file names itself as made for."""

from typing import Any

import pytest
from jsonargparse import Namespace

from cli.made_for import differences, laid_over, written
from cli.recipe_files import without_config

EIGHT_BIT = "lightning_memfit.techniques.optimizer_8bit.Optimizer8bit"
FEEDBACK = "lightning_memfit.PlanFeedback"


def specs(*names: str) -> list[Namespace]:
    return [Namespace(class_path=name, init_args=Namespace(number=number)) for number, name in enumerate(names)]


def paths(found: list[Namespace]) -> list[str]:
    return [spec.class_path for spec in found]


def test_a_plans_callbacks_replace_techniques_and_nothing_else() -> None:
    recipe = specs("mine.Averaging", EIGHT_BIT, "lightning.pytorch.callbacks.EarlyStopping")
    own = [Namespace(class_path=EIGHT_BIT, init_args=Namespace(paged=True)), *specs(FEEDBACK)]
    later = specs("lightning.pytorch.callbacks.Timer")
    found = laid_over([*recipe, *own, *later], [*recipe, *later], "plan.yaml")
    assert found[:2] == own
    assert paths(found[2:]) == ["mine.Averaging", "lightning.pytorch.callbacks.EarlyStopping", *paths(later)]


def test_a_list_that_replaces_the_plans_is_refused() -> None:
    with pytest.raises(ValueError, match=r"after `plan.yaml` replaces the list `callbacks`.*callbacks\+"):
        laid_over(specs("mine.Other"), specs("mine.Averaging", EIGHT_BIT), "plan.yaml")


def test_callbacks_of_one_class_and_modules_of_one_name_are_told_apart() -> None:
    def recipe(model: str, *factors: float) -> dict[str, Any]:
        callbacks: list[Any] = [{"class_path": "mine.Scale", "init_args": {"factor": factor}} for factor in factors]
        watchers = ("lightning.pytorch.callbacks.EarlyStopping", "lightning_memfit.Preemption")
        callbacks += [{"class_path": name, "init_args": {"number": 1}} for name in watchers]
        return {"model": {"class_path": model, "init_args": {}}, "trainer": {"callbacks": callbacks, "max_steps": 3}}

    first = written(recipe("a.Model", 1.0, 2.0))
    assert not any("EarlyStopping" in key or "Preemption" in key or "max_steps" in key for key in first)
    for other in (recipe("b.Model", 1.0, 2.0), recipe("a.Model", 1.5, 2.0), recipe("a.Model", 1.0)):
        assert differences({"recipe": first}, written(other))
    assert not differences({"recipe": first}, written(recipe("a.Model", 1.0, 2.0)))


def test_a_file_is_left_out_of_arguments() -> None:
    arguments = ["--config", "a.yaml", "-c", "plan.yaml", "--x=1", "--config=plan.yaml", "plan.yaml"]
    assert without_config(arguments, "plan.yaml") == ["--config", "a.yaml", "--x=1", "plan.yaml"]
