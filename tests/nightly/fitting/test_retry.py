"""Out-of-memory errors outside forward, backward and the optimizer's step change nothing, or end a run in words."""

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.recovery.retry import MemoryExhausted, explain_where, retry
from tests.helpers.fitting import Tagger, out_of_memory
from tests.helpers.trainers import difference, fit, fit_on_two_ranks, quiet_trainer

STEPS = 8


class Arrivals:
    """Counts, where a repeated batch can't take them back as it does with attributes of a module."""

    __slots__ = ("counts", "failures")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.failures = 0


class Fragile(Tagger):
    """Runs out of memory in a hook, half done: what can change has been changed.

    Args:
        place: Name of the hook.
        calls: At which of its calls.
    """

    def __init__(self, place: str = "", calls: Any = (), **kwargs: Any) -> None:
        super().__init__(dropout=0.3, **kwargs)
        self.place = place
        self.calls = set(calls)
        self.arrivals = Arrivals()

    @property
    def failures(self) -> int:
        return self.arrivals.failures

    def arrive(self, place: str, damage: Callable[[], object] = lambda: None) -> None:
        counts = self.arrivals.counts
        counts[place] = counts.get(place, 0) + 1
        if self.place == place and counts[place] in self.calls:
            self.arrivals.failures += 1
            damage()
            raise out_of_memory()

    def spoil_gradients(self) -> None:
        torch.rand(3)
        for parameter in list(self.parameters())[:2]:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def on_after_backward(self) -> None:
        self.log("after_backward", self.norm())
        self.arrive("on_after_backward", self.spoil_gradients)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("norm", self.norm(), on_step=True, on_epoch=True)
        self.arrive("on_before_optimizer_step", self.spoil_gradients)

    def norm(self) -> Tensor:
        return sum((p.grad.square().sum() for p in self.parameters() if p.grad is not None), torch.zeros(()))

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.arrive("clipping", self.spoil_gradients)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch["input_ids"]).mean())

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.dataset, 16)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _ in range(2)]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [4])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


PLACES = ("on_after_backward", "on_before_optimizer_step", "clipping")


def trained(module: Fragile, folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    torch.manual_seed(3)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    return fit(
        module,
        *callbacks,
        checkpoints,
        **{
            "precision": "64-true",
            "gradient_clip_val": 0.05,
            "max_steps": STEPS,
            "max_epochs": -1,
            "enable_checkpointing": True,
        }
        | options,
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_errors_between_backward_and_the_next_step_change_nothing(place: str, accumulate: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": accumulate}
    undisturbed = Fragile()
    expected = trained(undisturbed, tmp_path / "plain", MicroBatching(micro_batch_size=5), **options)
    calls = random.Random(place).sample(range(1, undisturbed.arrivals.counts[place] + 1), 2)
    module = Fragile(place, calls)
    found = trained(module, tmp_path / "disturbed", MicroBatching(micro_batch_size=5), **options)
    assert module.failures == 2
    assert difference(module, undisturbed) == 0.0
    assert found.callback_metrics == expected.callback_metrics
    assert found.global_step == expected.global_step
    for one, other in zip(found.lr_scheduler_configs, expected.lr_scheduler_configs, strict=True):
        assert one.scheduler.state_dict() == other.scheduler.state_dict()
    progress, wanted = (trainer.fit_loop.epoch_loop.scheduler_progress for trainer in (found, expected))
    assert progress == wanted
    # hooks before the one that failed run again with forward and backward; all others as often as without the error
    repeated = {"clipping": PLACES[:2], "on_before_optimizer_step": PLACES[:1]}.get(place, ())
    for name, count in undisturbed.arrivals.counts.items():
        assert module.arrivals.counts[name] == count + 2 * (name == place or name in repeated), name
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "disturbed")]
    assert files[0] == files[1]


@pytest.mark.parametrize("place", PLACES)
def test_errors_that_stay_end_the_run_in_words(place: str, tmp_path: Path) -> None:
    module = Fragile(place, range(3, 100))
    with pytest.raises(MemoryExhausted, match=r"Memory ran out in .* times in a row.*(`|CPU)"):
        trained(module, tmp_path, MicroBatching(micro_batch_size=5))
    assert module.failures == 3


def test_without_recovery_errors_are_as_they_were(tmp_path: Path) -> None:
    for place in PLACES:
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory.*injected\).$"):
            trained(Fragile(place, {2}), tmp_path, MicroBatching(micro_batch_size=5, recover=False))


@pytest.mark.parametrize("place", ["on_before_optimizer_step", "clipping"])
def test_scaled_gradients_are_unscaled_again(place: str, tmp_path: Path) -> None:
    def run(module: Fragile) -> pl.Trainer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return trained(
            module, tmp_path, MicroBatching(), precision=None, plugins=MixedPrecision("16-mixed", "cpu", scaler)
        )

    undisturbed, module = Fragile(), Fragile(place, {1, 5})
    expected, found = run(undisturbed), run(module)
    assert module.failures == 2
    assert difference(module, undisturbed) == 0.0
    assert found.precision_plugin.scaler.state_dict() == expected.precision_plugin.scaler.state_dict()


def test_lbfgs_and_a_failing_hook(tmp_path: Path) -> None:
    class WithLbfgs(Fragile):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    undisturbed, module = WithLbfgs(), WithLbfgs("on_before_optimizer_step", {4, 9})
    for one in (undisturbed, module):
        trained(one, tmp_path, MicroBatching(micro_batch_size=5))
    assert module.failures == 2
    assert difference(module, undisturbed) == 0.0


def test_elsewhere_the_error_says_where_and_what_helps(tmp_path: Path) -> None:
    class Elsewhere(Fragile):
        def on_train_batch_end(self, *_: Any) -> None:
            self.arrive("on_train_batch_end")

    with pytest.raises(
        torch.OutOfMemoryError, match=r"(?s)injected.*Memory ran out in `on_train_batch_end`.*limit_bytes"
    ):
        trained(Elsewhere("on_train_batch_end", {2}), tmp_path, MicroBatching())


def test_with_several_devices_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="With several devices"):
        fit_on_two_ranks(
            Fragile("on_before_optimizer_step", {2}, batch_size=8), tmp_path, MicroBatching(micro_batch_size=4)
        )


def test_everything_is_taken_off(tmp_path: Path) -> None:
    for calls in ((), range(3, 100)):
        trainer = quiet_trainer(MicroBatching(), precision="64-true")
        owners = (trainer, trainer.strategy, trainer.fit_loop.epoch_loop, trainer.strategy.precision_plugin)
        before = [set(vars(owner)) for owner in owners]
        try:
            trainer.fit(Fragile("clipping", calls))
        except MemoryExhausted:
            assert calls
        assert "_after_closure" not in set().union(
            *(set(vars(owner)) - keys for owner, keys in zip(owners, before, strict=True))
        )


def test_other_errors_are_not_repeated() -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        retry(fail, "a test", "Nothing.")
    assert len(calls) == 1


@pytest.mark.parametrize("place", ["on_after_backward", "on_before_optimizer_step"])
def test_hooks_that_changed_weights_are_not_repeated(place: str, tmp_path: Path) -> None:
    class ChangesWeights(Fragile):
        def spoil_gradients(self) -> None:
            next(self.parameters()).data.clamp_(-1, 1)
            with torch.no_grad():
                next(self.parameters()).clamp_(-1, 1)

    with pytest.raises(MemoryExhausted, match="Hooks had changed weights"):
        trained(ChangesWeights(place, {3}), tmp_path, MicroBatching(micro_batch_size=5))


def test_errors_of_the_system_are_explained_too() -> None:
    error = OSError(errno.ENOMEM, "Cannot allocate memory")
    explain_where(error, 1)
    assert "outside of hooks" in str(error)
    explained, other = MemoryExhausted("all was tried"), KeyError("x")
    for one in (explained, other):
        before = str(one)
        explain_where(one, 1)
        assert str(one) == before
    late = MemoryError()
    explain_where(late, 2)
    assert "which all devices would have to do together" in str(late)
