"""Validation batches are split where nothing changes by it, and said to be split where something may."""

import warnings
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_memfit.fitting import MicroBatching
from tests.helpers.fitting import VOCABULARY, Sentences, Tagger, out_of_memory
from tests.helpers.trainers import difference, fit, quiet_trainer


class Evaluated(Tagger):
    """Logs what `validation_step` tells it to, and runs out of memory with more samples than fit."""

    fits = 100

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.mean = MeanMetric()
        self.kept: list[Tensor] = []
        self.sizes: list[int] = []

    def evaluate(self, logits: Tensor, batch: dict[str, Tensor]) -> Any:
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"])
        self.log("val_loss", loss, batch_size=int((batch["labels"] != -100).sum()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.net(batch["input_ids"])
        self.sizes.append(len(logits))
        if len(logits) > self.fits:
            raise out_of_memory()
        self.kept.append(logits)
        return self.evaluate(logits, batch)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if len(batch["index"]) > self.fits:
            raise out_of_memory()
        logits = self.net(batch["input_ids"])
        return {"logits": logits, "index": batch["index"]}


def test_predictions_are_split_too() -> None:
    found = validated(Exact(), 5, "predict")
    assert [one["index"].tolist() for one in found] == [list(range(start, start + 16)) for start in (0, 16, 32)]
    assert [len(one["logits"]) for one in found] == [16] * 3


class Exact(Evaluated):
    """Values that parts make up exactly."""

    def evaluate(self, logits: Tensor, batch: dict[str, Tensor]) -> Any:
        self.accuracy(logits.argmax(-1).flatten(), batch["labels"].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("rows", float(len(logits)), reduce_fx="sum")
        self.log("largest", logits.max(), reduce_fx="max")
        loss = super().evaluate(logits, batch)
        return {"loss": loss, "logits": logits, "names": ["a"] * len(logits), "nothing": None}


def validated(module: Evaluated, fits: int, step: str = "validate", **options: Any) -> Any:
    module.fits = fits
    trainer = quiet_trainer(MicroBatching(**options), precision="64-true")
    arguments = {} if step == "predict" else {"verbose": False}
    return getattr(trainer, step)(module, DataLoader(Sentences(), 16), **arguments)


@pytest.mark.parametrize(("step", "fits"), [("validate", 5), ("test", 8)])
def test_exact_values_stay_what_they_are(step: str, fits: int) -> None:
    whole, cut = Exact(), Exact()
    (expected,) = validated(whole, 100, step)
    (found,) = validated(cut, fits, step)
    assert found == pytest.approx(expected, abs=1e-12)


class Kept(Evaluated):
    """Keeps for the end of the epoch what the step has found, in lists and in other things."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.losses: list[Tensor] = []
        self.outputs: dict[str, list[Any]] = {"rows": [], "of_samples": []}
        self.seen = Counter[int]()
        self.last = deque[float](maxlen=3)

    def evaluate(self, logits: Tensor, batch: dict[str, Tensor]) -> Any:
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"])
        self.losses.append(loss)
        self.outputs["rows"].append({"logits": logits, "loss": loss.item()})
        self.seen.update(batch["index"].tolist())
        self.outputs["of_samples"].extend(batch["index"].tolist())
        self.last.append(loss.item())


@pytest.mark.parametrize("fits", [8, 5])
def test_lists_that_are_kept_for_the_end_have_what_every_part_adds(fits: int) -> None:
    whole, cut = Kept(), Kept()
    validated(whole, 100)
    validated(cut, fits)
    assert cut.seen == whole.seen
    assert cut.outputs["of_samples"] == whole.outputs["of_samples"]
    assert len(cut.losses) > len(whole.losses)


def test_training_goes_on_as_without_the_error() -> None:
    whole, cut = Exact(dropout=0.3), Exact(dropout=0.3)
    cut.fits = 5
    trainers = []
    for module in (whole, cut):
        torch.manual_seed(1)
        loader = DataLoader(Sentences(), 16)
        trainers.append(fit(module, MicroBatching(micro_batch_size=4), val_loader=loader, precision="64-true"))
    assert difference(whole, cut) == 0.0
    for name, value in trainers[0].callback_metrics.items():
        assert float(trainers[1].callback_metrics[name]) == pytest.approx(float(value), abs=1e-9), name


class Perplexity(Evaluated):
    def evaluate(self, logits: Tensor, batch: dict[str, Tensor]) -> Any:
        self.log("perplexity", nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"]).exp())


def test_values_that_are_no_means_are_said_to_be_those_of_parts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        validated(Perplexity(), 8)
    assert "now means over parts" in caplog.text


def test_a_batch_that_can_not_be_cut_ends_the_run_in_words() -> None:
    class Uneven(Exact):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            raise out_of_memory()

    loader = DataLoader([{"a": torch.zeros(2, 3), "b": torch.zeros(3, 1)}], None)
    trainer = quiet_trainer(MicroBatching())
    with pytest.raises(torch.OutOfMemoryError, match="can't be cut.*`split_batch"):
        trainer.validate(Uneven(), loader, verbose=False)


def test_one_sample_that_does_not_fit_ends_the_run_in_words() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="One sample does not fit in `validation_step`"):
        validated(Exact(), 0)


def test_results_that_a_module_keeps_are_named_as_the_cause() -> None:
    """As in Lightning's issues 8453, 5735 and 8215."""

    class Keeps(Exact):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.kept.append(torch.zeros(100_000))
            if batch_idx == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    module = Keeps()
    module.kept = []  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError, match=r"`self.kept` keeps 2\.29 MiB of earlier batches"):
        validated(module, 16)


def test_a_size_that_is_found_while_evaluating_is_no_warning() -> None:
    """A run under a memory limit, such as quickstart, goes as it should, and stderr stays empty."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert validated(Exact(), 5)
    assert not [one for one in caught if "ran out" in str(one.message)]


class ChangesBatch(Exact):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch["labels"]
        labels.copy_(labels.where(labels == -100, (labels + 1) % VOCABULARY))
        batch = {"input_ids": batch.pop("input_ids"), "labels": batch["labels"], "index": batch["index"]}
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_batches_that_the_step_changes_are_repeated_as_the_loader_gave_them(inference_mode: bool) -> None:
    found = []
    for fits in (100, 8):
        module = ChangesBatch()
        module.fits = fits
        trainer = quiet_trainer(MicroBatching(), precision="64-true", inference_mode=inference_mode)
        found += trainer.validate(module, DataLoader(Sentences(), 16), verbose=False)
    assert found[1] == pytest.approx(found[0], abs=1e-12)


class TinyForCausalLM(nn.Module):
    """Shifts labels as a language model of Hugging Face does."""

    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(VOCABULARY, VOCABULARY)

    def loss_function(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(ids)[:, :-1].transpose(1, 2), labels[:, 1:])


class Built(Evaluated):
    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = TinyForCausalLM().double()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if len(batch["index"]) > self.fits:
            raise out_of_memory()
        size = int((batch["labels"][:, 1:] != -100).sum())
        self.log("val_loss", self.model.loss_function(batch["input_ids"], batch["labels"]), batch_size=size)
        return self.model.loss_function(batch["input_ids"], batch["labels"])

    def on_validation_batch_end(self, outputs: Tensor, *_: Any) -> None:
        self.kept.append(outputs)


def test_models_that_are_built_when_the_run_begins_are_known() -> None:
    whole, cut = Built(), Built()
    validated(whole, 100)
    validated(cut, 8)
    torch.testing.assert_close(torch.stack(cut.kept), torch.stack(whole.kept), rtol=1e-12, atol=1e-12)
