"""Micro-batches give what the whole effective batch gives, and out-of-memory errors change nothing."""

import random

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.size.sizes import MicroBatchSize
from tests.helpers.fitting import VOCABULARY, Failing, Tagger
from tests.helpers.trainers import difference, fit, fit_on_two_ranks

TOLERANCE = 2e-6
SPLITS = [4, 1, 5, 3]


def run_tagger(*callbacks: pl.Callback, batch_size: int = 16, **kwargs: object) -> tuple[Tagger, pl.Trainer]:
    module = Tagger(batch_size=batch_size)
    return module, fit(module, *callbacks, **kwargs)


@pytest.fixture(scope="module")
def whole() -> tuple[Tagger, pl.Trainer]:
    return run_tagger(MicroBatching(micro_batch_size=16))


def test_one_micro_batch_is_plain_lightning(whole: tuple[Tagger, pl.Trainer]) -> None:
    plain, trainer = run_tagger()
    assert difference(plain, whole[0]) == 0.0
    assert trainer.callback_metrics == whole[1].callback_metrics


@pytest.mark.parametrize("size", SPLITS)
def test_splits_equal_the_whole(whole: tuple[Tagger, pl.Trainer], size: int) -> None:
    module, trainer = run_tagger(MicroBatching(global_batch_size=16, micro_batch_size=size))
    assert difference(module, whole[0]) < TOLERANCE
    assert module.seen == whole[0].seen
    assert trainer.global_step == whole[1].global_step
    for name, value in whole[1].callback_metrics.items():
        assert trainer.callback_metrics[name] == pytest.approx(float(value), abs=1e-6)


@pytest.mark.parametrize("batch_size", [16, 20])  # 20: the last batch has 8 samples
def test_windows_of_accumulation_are_exact(batch_size: int) -> None:
    reference = Tagger(batch_size=40 if batch_size == 20 else 32)  # windows of two; 48 samples leave a ragged one
    fit(reference, MicroBatching())
    for size in (batch_size, 3):
        module, _ = run_tagger(MicroBatching(micro_batch_size=size), batch_size=batch_size, accumulate_grad_batches=2)
        assert difference(module, reference) < TOLERANCE


@pytest.mark.parametrize("size", [8, 3])
def test_two_ranks_equal_one(whole: tuple[Tagger, pl.Trainer], size: int, tmp_path: object) -> None:
    (first, seen), (second, also_seen) = fit_on_two_ranks(
        Tagger(batch_size=8), tmp_path, MicroBatching(global_batch_size=16, micro_batch_size=size)
    )
    assert difference(first, second) == 0.0
    assert difference(first, whole[0]) < TOLERANCE
    assert sorted(seen + also_seen) == sorted(whole[0].seen)


ON_ONE_RANK = [("forward", (2, 6, 9)), ("backward", (3, 7)), ("step", (1,)), ("before step", (1,))]


@pytest.mark.parametrize(("where", "calls"), ON_ONE_RANK)
def test_error_on_one_rank_alone(
    whole: tuple[Tagger, pl.Trainer], where: str, calls: tuple[int, ...], tmp_path: object
) -> None:
    module = Failing(where, calls, rank=1, batch_size=8)
    (first, _), (second, _) = fit_on_two_ranks(module, tmp_path, MicroBatching(micro_batch_size=4))
    assert difference(first, second) == 0.0
    assert difference(first, whole[0]) < TOLERANCE


def test_other_errors_stop_every_rank(tmp_path: object) -> None:
    class Broken(Tagger):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if self.global_rank == 1 and self.global_step == 1:
                raise KeyError("no such column")
            return super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match=r"no such column|Rank 1 failed"):
        fit_on_two_ranks(Broken(batch_size=8), tmp_path, MicroBatching(micro_batch_size=4))


@pytest.mark.parametrize("where", ["forward", "middle", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_random_errors_change_nothing(where: str, accumulate: int) -> None:
    calls = random.Random(where).sample(range(1, 20), 4)
    options = {"max_steps": 20, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    undisturbed = Tagger(batch_size=16 // accumulate)
    trainer = fit(undisturbed, MicroBatching(), **options)
    module = Failing(where, calls, batch_size=16 // accumulate)
    callback = MicroBatching()
    disturbed = fit(module, callback, **options)
    assert module.failures >= 3
    assert len(callback.changes) == 1 + module.failures
    assert difference(module, undisturbed) < 1e-5
    for name, value in trainer.callback_metrics.items():
        assert disturbed.callback_metrics[name] == pytest.approx(float(value), abs=1e-5)


def test_an_error_in_the_first_optimizer_step_changes_nothing() -> None:
    undisturbed, module = Tagger(), Failing("step", (1,))
    for one in (undisturbed, module):
        fit(one, MicroBatching(micro_batch_size=4))
    assert module.failures == 1
    assert difference(module, undisturbed) < 1e-5  # repeated with `foreach=False`


def test_repeated_batches_draw_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MicroBatchSize, "shrink", lambda self, failed: self.current)  # same size, same dropout masks
    undisturbed, module = Tagger(dropout=0.5), Failing("backward", (2, 9), dropout=0.5)
    for one in (undisturbed, module):
        torch.manual_seed(2)
        fit(one, MicroBatching(micro_batch_size=4))
    assert module.failures == 2
    assert difference(module, undisturbed) == 0.0


def test_below_one_sample_the_error_names_the_largest_tensors() -> None:
    callback = MicroBatching(micro_batch_size=1)
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)one sample.*last_resort='recompute'.*largest tensors.*net"):
        fit(Failing("backward", range(1, 10)), callback)


class Scored(Tagger):
    """Logs a metric object, its loss with a batch size, a sum and an extreme."""

    def __init__(self, **kwargs: int) -> None:
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.before: list[float] = []
        self.after = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self.net(batch["input_ids"])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"])
        self.accuracy(logits.argmax(-1).flatten(), batch["labels"].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("rows", float(len(logits)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("loss", loss.detach(), batch_size=len(logits), on_step=True, on_epoch=True)
        self.log("largest", batch["index"].max().float(), reduce_fx="max", on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits}

    def on_before_backward(self, loss: Tensor) -> None:
        self.before.append(float(loss))

    def on_after_backward(self) -> None:
        self.after += 1

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: dict[str, Tensor], batch_idx: int) -> None:
        assert outputs["logits"].shape[:2] == batch["input_ids"].shape
        self.last_loss = outputs["loss"]


@pytest.mark.parametrize("size", [4, 5])
def test_logged_values_and_hooks_are_those_of_the_whole_batch(size: int) -> None:
    plain, split = Scored(batch_size=20), Scored(batch_size=20)
    expected = fit(plain).callback_metrics
    found = fit(split, MicroBatching(micro_batch_size=size)).callback_metrics
    assert set(found) == set(expected)
    del expected["accuracy_step"]  # of the last micro-batch, as under Lightning's own accumulation
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), abs=1e-5), name
    assert split.before == pytest.approx(plain.before, abs=1e-5)
    assert split.after == plain.after
    assert float(split.last_loss) == pytest.approx(float(plain.last_loss), abs=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision_and_clipping_are_lightnings(precision: str) -> None:
    options = {"precision": precision, "gradient_clip_val": 0.1}
    plain, split = Tagger(), Tagger()
    fit(plain, **options)
    fit(split, MicroBatching(micro_batch_size=5), **options)
    assert difference(plain, split) < (2e-2 if precision == "bf16-mixed" else 1e-12)


def test_gradient_scaler_and_lbfgs() -> None:
    def scaled() -> dict[str, object]:
        return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))}

    class WithLbfgs(Tagger):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    plain, split, failing = Tagger(), Tagger(), Failing("backward", (3,))
    trainer = fit(plain, **scaled())
    other = fit(split, MicroBatching(micro_batch_size=5), **scaled())
    fit(failing, MicroBatching(), **scaled())
    assert difference(plain, split) < 1e-3
    assert difference(plain, failing) < 1e-3
    assert trainer.precision_plugin.scaler.state_dict() == other.precision_plugin.scaler.state_dict()
    plain, split = WithLbfgs(), WithLbfgs()
    fit(plain)
    fit(split, MicroBatching(micro_batch_size=5))
    assert difference(plain, split) < 1e-3
