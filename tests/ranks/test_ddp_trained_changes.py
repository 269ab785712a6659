"""Under DDP, all ranks keep one device's weights when what is trained changes during training, or the step is refused.

Gradients of a weight that is in none of DDP's buckets are averaged by nobody, and nothing tells.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_memfit import MicroBatching
from lightning_memfit.strategies import DataParallelStrategy
from tests.helpers.ranks import num_ranks, run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.zoo import usual_modules

FIND_UNUSED = {"find_unused_parameters": True}
CASES: dict[str, tuple[str, dict[str, bool], dict[str, Any]]] = {
    "in the step": ("Alternating", FIND_UNUSED, {}),
    "in the step, by hand": ("Frozen", FIND_UNUSED, {}),
    "in the step and a hook": ("AlternatingAndUnfrozen", FIND_UNUSED, {}),
    "in a hook": ("AlternatingInHook", {}, {}),
    "in a hook, found": ("AlternatingInHook", FIND_UNUSED, {}),
    "unfrozen, accumulating": ("Unfrozen", {}, {"accumulate_grad_batches": 2}),
    "added": ("Added", {}, {}),
    "added, frozen at first": ("AddedFrozen", {}, {"max_epochs": 3}),
    "added, accumulating": ("Added", {}, {"accumulate_grad_batches": 2}),
    "added after a validation, accumulating": (
        "AddedValidating",
        {},
        {"accumulate_grad_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0},
    ),
    "unfrozen, micro-batches": ("Unfrozen", {}, {}),
    "added, micro-batches": ("Added", {}, {"accumulate_grad_batches": 2}),
    "added, frozen at first, micro-batches": ("AddedFrozenApart", {}, {"max_epochs": 3}),
    "added before the first step, micro-batches found": ("AddedAtOnce", {}, {}),
    "in a hook, micro-batches": ("AlternatingInHook", {}, {}),
    "in a hook, accumulating, micro-batches": ("AlternatingInHook", {}, {"accumulate_grad_batches": 2}),
}
REFUSED = {
    "unfrozen in the step": ("UnfrozenInStep", FIND_UNUSED, "`net.inp.weight` was frozen, or was not there"),
    "frozen in the step": ("Alternating", {}, "find_unused_parameters=True"),
    "added in the step": ("AddedInStep", {}, "`extra.weight` was frozen, or was not there"),
    "added in the step, micro-batches": ("AddedInStep", {}, "`extra.weight` was frozen, or was not there"),
}


class Unsynchronized(pl.Callback):
    """Checks that no forward pass of a micro-batch synchronizes ranks, of which each may run its own number."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            assert not trainer.strategy.model.require_forward_param_sync


def train(name: str, label: str = "", **options: Any) -> dict[str, torch.Tensor]:
    is_found = label.endswith("micro-batches found")
    batching = MicroBatching(limit_bytes=1 << 30) if is_found else MicroBatching(micro_batch_size=1)
    callbacks: list[pl.Callback] = [Unsynchronized(), batching]
    if "micro-batches" not in label:
        callbacks = []
    options = {"max_epochs": 2, "limit_val_batches": 0, "use_distributed_sampler": False, **options}
    trainer = quiet_trainer(*callbacks, **options)
    module = getattr(usual_modules, name)()
    trainer.fit(module)
    return {key: one.detach().clone() for key, one in module.named_parameters()}


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label, (name, ddp, options) in CASES.items():
        strategy = DataParallelStrategy(process_group_backend="gloo", **ddp)
        found[label] = train(name, label, strategy=strategy, devices=2, **options)
    for label, (name, ddp, _) in REFUSED.items():
        try:
            train(name, label, strategy=DataParallelStrategy(process_group_backend="gloo", **ddp), devices=2)
        except Exception as error:
            found[label] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ended = run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("trained"))
    assert [one.code for one in ended] == [0, 0], ended[0].output[-3000:]
    return [one.result for one in ended]


@pytest.mark.parametrize("label", CASES)
def test_ranks_have_the_weights_of_one_device(ranks: list[dict[str, Any]], label: str) -> None:
    assert num_ranks == 1
    name, _, options = CASES[label]
    expected = train(name, label, **options)
    for found in ranks:
        assert set(found[label]) == set(expected)
        for key, weight in expected.items():
            torch.testing.assert_close(found[label][key], weight, atol=1e-5, rtol=0, msg=key)
    start = dict(getattr(usual_modules, name)().named_parameters())
    moved = {key: float((expected[key] - one.detach()).abs().max()) for key, one in start.items()}
    assert min(moved[key] for key in moved if key.endswith("weight")) > 0.001


@pytest.mark.parametrize("label", REFUSED)
def test_what_no_bucket_has_is_refused(ranks: list[dict[str, Any]], label: str) -> None:
    for found in ranks:
        assert REFUSED[label][2] in found.get(label, "trained")


class FrozenOnOneRank(usual_modules.Base):
    """Trains a layer on the second rank alone, from the second batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.inp.requires_grad_(self.global_rank > 0 or batch_idx == 0)


def trained_apart() -> list[dict[str, torch.Tensor]]:
    found = []
    for kind in (DDPStrategy, DataParallelStrategy):
        options = {"strategy": kind(process_group_backend="gloo"), "devices": 2, "use_distributed_sampler": False}
        trainer = quiet_trainer(MicroBatching(micro_batch_size=1), limit_val_batches=0, max_epochs=1, **options)
        module = FrozenOnOneRank()
        trainer.fit(module)
        found.append({key: one.detach().clone() for key, one in module.named_parameters()})
    return found


def test_ranks_may_train_different_weights_with_micro_batching(tmp_path: Path) -> None:
    ended = run_ranks(trained_apart, 2, tmp_path, seconds=40)
    assert [one.error for one in ended] == ["", ""]
    lightnings, *others = [weights for one in ended for weights in (one.result or [{}])]
    assert len(others) == 3, ended[0].output[-3000:]
    for found in others:
        for key, weight in lightnings.items():
            torch.testing.assert_close(found[key], weight, atol=1e-6, rtol=0, msg=key)
