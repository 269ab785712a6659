"""Under ZeRO, steps by hand, clipping and frozen weights are those of one device, or are refused by name."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MicroBatching
from tests.helpers import ranks
from tests.helpers.ranks import Ended, run_ranks
from tests.helpers.strategy_runs import ZERO
from tests.helpers.trainers import quiet_trainer

pytest.importorskip("deepspeed")

STAGES = ZERO | {
    "in_parts": {
        "stage": 3,
        "offload_optimizer": True,
        "config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    },
}
Case = Callable[["Steps", Any, int], Any]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


class Steps(pl.LightningModule):
    """Two layers and one that a step may leave out; its `training_step` is the function that it is given."""

    def __init__(self, step: Case, by_hand: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.step = not by_hand, step
        self.net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
        self.other = nn.Linear(4, 2)

    def forward(self, batch: Any, other: bool = True) -> Tensor:
        predicted = self.net(batch[0])
        return (predicted + self.other(batch[0]) if other else predicted).sub(batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def train_dataloader(self) -> DataLoader:
        generator, count = torch.Generator().manual_seed(1), ranks.num_ranks
        data = torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)
        rank = int(os.environ.get("RANK", 0)) if count > 1 else 0
        return DataLoader(TensorDataset(*(one[rank::count] for one in data)), batch_size=4 // count)

    val_dataloader = test_dataloader = train_dataloader


def over_batches(module: Steps, batch: Any, batch_idx: int) -> None:
    """Accumulate over two batches; the other layer is in the first alone."""
    module.manual_backward(module(batch, batch_idx % 2 == 0) / 2)
    if batch_idx % 2:
        module.optimizers().step()
        module.optimizers().zero_grad()


def within_a_batch(module: Steps, batch: Any, batch_idx: int) -> None:
    """Two passes before a step, and two steps; before, a pass whose gradients are thrown away."""
    module.manual_backward(module(batch) * 5)
    for _ in range(2):
        module.optimizers().zero_grad()
        module.manual_backward(module(batch))
        module.manual_backward(module(batch, False) * 2)
        module.optimizers().step()


def clipped(module: Steps, batch: Any, batch_idx: int) -> None:
    """Every other step is clipped."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module(batch))
    if batch_idx % 2:
        module.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    optimizer.step()


def cleared_by_the_module(module: Steps, batch: Any, batch_idx: int) -> None:
    """A pass whose gradients are thrown away, and one that is stepped."""
    module.manual_backward(module(batch) * 5)
    module.zero_grad()
    module.manual_backward(module(batch))
    module.optimizers().step()
    module.zero_grad(set_to_none=False)


BY_HAND: dict[str, Case] = {one.__name__: one for one in (over_batches, within_a_batch, clipped, cleared_by_the_module)}


def weights(module: pl.LightningModule, strategy: Any, *callbacks: pl.Callback, **options: Any) -> dict[str, Tensor]:
    """Train, and return whole master weights."""
    fit(module, strategy, *callbacks, **options)
    if strategy is None:
        return {name: one.detach().clone() for name, one in module.named_parameters()}
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(one).clone() for name, one in module.named_parameters()}


def fit(module: pl.LightningModule, strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0} | options
    trainer = trainer_with(strategy, *callbacks, **options)
    trainer.fit(module)
    return trainer


def trainer_with(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    from lightning_memfit.strategies import ZeroStrategy

    chosen, devices = ("auto", 1) if strategy is None else (ZeroStrategy(**copy.deepcopy(strategy)), ranks.num_ranks)
    return quiet_trainer(*callbacks, strategy=chosen, devices=devices, use_distributed_sampler=False, **options)


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def on_ranks(folder: Path, expected: dict[str, dict[str, Tensor]], train: Callable[[str, Any], Any]) -> list[Ended]:
    """Call `train(name, strategy)` on two ranks for all stages, and compare with the weights that one device has."""

    def run() -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        for name in expected:
            for stage, strategy in STAGES.items():
                try:
                    found[f"{name}, {stage}"] = furthest(train(name, strategy), expected[name])
                except MisconfigurationException as error:
                    found[f"{name}, {stage}"] = str(error)
        return found

    ended = run_ranks(run, 2, folder, seconds=200)
    assert all(one.code == 0 for one in ended), ended[0].output[-5000:]
    return ended


@pytest.mark.nightly
def test_steps_by_hand_are_those_of_one_device(tmp_path: Path) -> None:
    def train(name: str, strategy: Any) -> dict[str, Tensor]:
        return weights(Steps(BY_HAND[name]), strategy)

    expected = {name: train(name, None) for name in BY_HAND}
    for ended in on_ranks(tmp_path, expected, train):
        assert {name: one for name, one in ended.result.items() if isinstance(one, str) or one > 2e-6} == {}


def plain(module: Steps, batch: Any, batch_idx: int) -> Tensor:
    return module(batch)


class ClipsItself(Steps):
    """Clips gradients by its own rule in every other step."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class HooksGradients(Steps):
    """Halves gradients by hooks of weights, of which it asks where they are."""

    def on_train_start(self) -> None:
        for weight in self.parameters():
            if not weight.is_cuda and weight.is_cpu and weight.element_size() == weight.itemsize == 4:
                weight.register_hook(lambda gradient: gradient * 0.5)


class Rests(Steps):
    """Sets the rate of a layer to 0 from the second epoch on, as docs/guides/weights.md advises."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [self.net.parameters(), self.other.parameters()]
        return torch.optim.AdamW([{"params": list(group)} for group in groups], lr=0.01, weight_decay=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            self.optimizers().param_groups[0]["lr"] = 0.0


AROUND: dict[str, Callable[[], Steps]] = {
    "clips itself": lambda: ClipsItself(plain, by_hand=False),
    "hooks": lambda: HooksGradients(plain, by_hand=False),
    "rests": lambda: Rests(plain, by_hand=False),
    "rests, frozen": lambda: RestsFrozen(plain, by_hand=False),
    "in some": lambda: InSomeSamples(plain, by_hand=False),
}


@pytest.mark.nightly
def test_steps_beside_the_usual_are_those_of_one_device(tmp_path: Path) -> None:
    def train(name: str, strategy: Any) -> dict[str, Tensor]:
        callbacks = [cut()] if name == "in some" and strategy is not None else []
        return weights(AROUND[name](), strategy, *callbacks)

    expected = {name: train(name, None) for name in AROUND}
    for ended in on_ranks(tmp_path, expected, train):
        assert {name: one for name, one in ended.result.items() if isinstance(one, str) or one > 2e-6} == {}
        assert "will not actually clip" not in ended.output
        assert "`ClipsItself.configure_gradient_clipping` runs under ZeRO" in ended.output or not ended.output


class Unfreezes(Steps):
    """Its optimizer has weights that it freezes before training, and trains them from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(plain, by_hand=False)
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


class FrozenGroup(Steps):
    """One of its optimizer's groups has frozen weights only."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.net[0].requires_grad_(False)
        groups = [self.net[2].parameters(), self.net[0].parameters(), self.other.parameters()]
        return torch.optim.SGD([{"params": list(group)} for group in groups], lr=0.1)


def clipped_by_value(module: Steps, batch: Any, batch_idx: int) -> None:
    module.manual_backward(module(batch))
    module.clip_gradients(module.optimizers(), gradient_clip_val=0.05, gradient_clip_algorithm="value")


class RestsFrozen(Rests):
    """Freezes it as well, from then on."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch > 0:
            self.net.requires_grad_(False)

    def on_train_end(self) -> None:
        self.net.requires_grad_(True)


class InSomeSamples(Steps):
    """The other layer takes part in the first half of each batch alone."""

    def forward(self, batch: Any, other: bool = True) -> Tensor:
        predicted, use = self.net(batch[0]), batch[2]
        if use.any():
            predicted = predicted + self.other(batch[0]) * use[:, None]
        return predicted.sub(batch[1]).square().mean()

    def train_dataloader(self) -> DataLoader:
        data = super().train_dataloader().dataset.tensors
        size = 4 // ranks.num_ranks
        return DataLoader(TensorDataset(*data, torch.arange(len(data[0])) % size < size / 2), batch_size=size)


REFUSED: dict[str, tuple[Callable[[], Steps], str, tuple[str, ...]]] = {
    "unfreezes": (Unfreezes, "`net.0.weight` was frozen when training began", ("stage_1", "offload", "stage_3")),
    "frozen group": (lambda: FrozenGroup(plain, by_hand=False), "optimizer's group 1 are frozen", ("stage_2",)),
    "clips by value": (lambda: Steps(clipped_by_value), "'value'", ("stage_3",)),
}


def cut() -> MicroBatching:
    return MicroBatching(micro_batch_size=1, allow_batch_statistics=True)


def refusals() -> dict[str, str]:
    found = {}
    for name, (make, words, stages) in REFUSED.items():
        for stage in stages:
            with pytest.raises(MisconfigurationException) as error:
                fit(make(), STAGES[stage])
            found[f"{name}, {stage}"] = "" if words in str(error.value) else str(error.value)
    return found


@pytest.mark.nightly
def test_what_deepspeed_would_not_train_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for ended in run_ranks(refusals, 2, tmp_path, seconds=120):
        assert ended.code == 0, ended.output[-5000:]
        assert {name: one for name, one in ended.result.items() if one} == {}


class Counting(Steps):
    """Has buffers, an extra state, and a hook that counts calls of a layer."""

    def __init__(self) -> None:
        super().__init__(plain, by_hand=False)
        self.register_buffer("seen", torch.zeros(4))
        self.tag, self.calls = "new", 0
        self.net[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def on_train_epoch_end(self) -> None:
        self.seen += 1
        self.tag = "trained"

    def get_extra_state(self) -> dict[str, str]:
        return {"tag": self.tag}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.tag = state["tag"]


def evaluate(folder: Path) -> dict[str, Any]:
    """Save a run, test it in new modules, twice with one trainer, and train on what was tested."""
    found = {}
    for stage in ("stage_2", "stage_3"):
        path = folder / stage
        fit(Counting(), STAGES[stage]).save_checkpoint(path)
        module = Counting()
        trainer = trainer_with(STAGES[stage])
        losses = [trainer.test(module, ckpt_path=path, verbose=False)[0]["val_loss"] for _ in range(2)]
        calls, module.calls = module.calls, 0
        found[stage] = (module.seen.tolist(), module.tag, losses[0] == losses[1], calls)
        fit(module, STAGES[stage], max_epochs=1)
        found[stage] += (module.calls,)
    return found


def test_evaluation_takes_what_was_saved_and_leaves_hooks(tmp_path: Path) -> None:
    for ended in run_ranks(evaluate, 2, tmp_path / "ranks", tmp_path, seconds=120):
        assert ended.code == 0, ended.output[-5000:]
        whole = ([2.0] * 4, "trained", True, 8, 4)
        assert ended.result == {"stage_2": whole, "stage_3": whole}
