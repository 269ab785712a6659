"""What a plan's file names itself as made for."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import Namespace

from cli.made_for import PLAN_AGAIN, differences, laid_over, other_device, other_parameters, parameters_of, written
from cli.recipe_files import without_config
from cli.recipe_run import load_recipe
from lightning_memfit.device.catalogue import DEVICES
from lightning_memfit.profile.files import file_digest

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


def test_an_equal_technique_in_the_recipe_is_taken_once() -> None:
    technique = specs(EIGHT_BIT)
    assert laid_over([*technique, *technique], technique, "plan.yaml") == technique


def test_feedback_of_an_earlier_plan_goes() -> None:
    older, newer = (Namespace(class_path=FEEDBACK, init_args=Namespace(rates=name)) for name in ("T4", "H100"))
    assert laid_over([older, newer], [older], "plan.yaml") == [newer]


def test_a_list_that_replaces_the_plans_is_refused() -> None:
    with pytest.raises(ValueError, match=r"after `plan.yaml` replaces the list `callbacks`.*callbacks\+"):
        laid_over(specs("mine.Other"), specs("mine.Averaging", EIGHT_BIT), "plan.yaml")


def test_callbacks_of_one_class_and_modules_of_one_name_are_told_apart() -> None:
    def recipe(model: str, *factors: float) -> Namespace:
        callbacks = [Namespace(class_path="mine.Scale", init_args=Namespace(factor=factor)) for factor in factors]
        watchers = specs("lightning.pytorch.callbacks.EarlyStopping", "lightning_memfit.Preemption")
        trainer = Namespace(callbacks=[*callbacks, *watchers], max_steps=3)
        return Namespace(model=Namespace(class_path=model, init_args=Namespace()), trainer=trainer)

    first = written(recipe("a.Model", 1.0, 2.0))
    assert not any("EarlyStopping" in key or "Preemption" in key or "max_steps" in key for key in first)
    for other in (recipe("b.Model", 1.0, 2.0), recipe("a.Model", 1.5, 2.0), recipe("a.Model", 1.0)):
        assert differences({"recipe": first}, written(other))
    assert not differences({"recipe": first}, written(recipe("a.Model", 1.0, 2.0)))


def test_differences_are_named() -> None:
    stamp = {"recipe": {"data.batch_size": 64, "trainer.precision": "bf16-mixed", "gone": 1}}
    now = {"data.batch_size": 32, "trainer.precision": "bf16-mixed", "model.text": "x" * 100}
    assert differences(stamp, now) == [
        "`data.batch_size` was 64 and is 32",
        "`gone` was 1 and is not set",
        f"`model.text` was not set and is '{'x' * 56}...",
    ]
    assert differences({}, now) == []


def test_another_module_of_the_same_name_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "tagger_of_a_plan.py"
    module.write_text("WIDTH = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    stamp = {"modules": {"tagger_of_a_plan": file_digest(module)}}
    assert differences(stamp, {}) == []
    module.write_text("WIDTH = 2\n")
    assert differences(stamp, {}) == ["the module `tagger_of_a_plan` is another"]


def test_models_are_told_by_names_and_shapes_of_their_parameters() -> None:
    """Not by types, which pretrained weights bring, and without those that are yet to be made."""
    stamp = {"parameters": parameters_of(torch.nn.Linear(2, 3))}
    assert other_parameters(stamp, torch.nn.Linear(2, 3).bfloat16()) is None
    assert "`model` had 9 parameters and has 12, by a file or variable" in said(stamp, torch.nn.Linear(2, 4))
    assert "names or shapes" in said(stamp, torch.nn.Linear(8, 1))
    lazy = parameters_of(torch.nn.LazyLinear(3))
    assert lazy is not None
    assert lazy["number"] == 0
    assert other_parameters({}, torch.nn.Linear(2, 4)) is None


def said(stamp: Mapping[str, Any], model: torch.nn.Module) -> str:
    return " ".join(other_parameters(stamp, model) or ())


class Later(pl.LightningModule):
    """A model that builds itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layer: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.width < 0:
            raise RuntimeError(self.trainer)
        if self.layer is None:
            self.layer = torch.nn.Linear(2, self.width)


def test_models_that_build_themselves_are_told_by_what_they_build() -> None:
    """They have no parameters before; one that only a run can build isn't told from others."""
    stamp = {"parameters": parameters_of(Later(3))}
    same, larger = Later(3), Later(4)
    assert other_parameters(stamp, same) is None
    assert same.layer is None
    assert "`model` had 9 parameters and has 12" in said(stamp, larger)
    assert other_parameters(stamp, Later(-1)) is None


def test_of_weights_that_the_pretrained_ones_untie_no_new_plan_is_promised() -> None:
    """A plan is made without weights, and takes those for shared that the model's configuration calls so."""
    tied, untied = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(2))
    tied[1].weight = tied[0].weight
    stamp = {"parameters": parameters_of(tied)}
    message = said(stamp, untied)
    assert "`model` had 24 parameters and has 40, as other ones of them are shared (tied weights)" in message
    assert "tie_word_embeddings: false" in message
    assert PLAN_AGAIN not in message


IN_SETUP = """
import torch, lightning.pytorch as pl

class InSetup(pl.LightningModule):
    def setup(self, stage):
        self.layer = torch.nn.Linear(4, 2)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())
"""


def test_a_model_is_compared_as_it_was_before_its_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loader needs that for a batch, and a run by the plan hasn't called it yet."""
    (tmp_path / "in_setup_of_a_test.py").write_text(IN_SETUP)
    monkeypatch.syspath_prepend(str(tmp_path))
    with load_recipe(["--model", "in_setup_of_a_test.InSetup", "--trainer.logger=false"]) as run:
        assert sum(1 for _ in run.module.parameters()) == 2
        stamp = {"parameters": run.parameters()}
        assert other_parameters(stamp, type(run.module)()) is None


def test_a_plan_for_another_device_is_told_from_one_for_a_size() -> None:
    assert other_device("RTX 3060", "H100")
    assert other_device("RTX 3060", "CPU, 2 threads")
    assert not other_device("RTX 3060", "RTX 3060")
    assert not other_device("24GiB", "H100")
    assert not other_device("device of 900.00 MiB", "CPU, 2 threads")
    assert not other_device("this CPU", "CPU, 2 threads")


def test_a_plan_made_on_a_card_is_for_that_card() -> None:
    """Plans without `--device` have the driver's name, and were refused on the machine that they were made on."""
    for driver, here in (
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("Tesla T4", "T4"),
    ):
        assert not other_device(driver, here)
        assert other_device(driver, "RTX 2080 Ti")
    assert other_device("NVIDIA A100 80GB PCIe", "A100 80GB")
    assert not other_device("RTX 3080 10GB", "NVIDIA GeForce RTX 3080")  # of either size
    assert other_device("RTX 3080 10GB", "NVIDIA GeForce RTX 3080 Ti")
    assert all(not other_device(spec.name, spec.name) for spec in DEVICES)


def test_a_file_is_left_out_of_arguments() -> None:
    arguments = ["--config", "a.yaml", "-c", "plan.yaml", "--x=1", "--config=plan.yaml", "plan.yaml"]
    assert without_config(arguments, "plan.yaml") == ["--config", "a.yaml", "--x=1", "plan.yaml"]


def test_functions_are_told_by_their_names() -> None:
    """Another process has the same one at another address."""
    batching = Namespace(class_path="lightning_memfit.MicroBatching", init_args=Namespace(loss_weight=file_digest))
    found = written(Namespace(trainer=Namespace(callbacks=[batching])))
    assert found["trainer.callbacks.MicroBatching.loss_weight"] == "lightning_memfit.profile.files.file_digest"
