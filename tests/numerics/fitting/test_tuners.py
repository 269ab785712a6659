"""Lightning's tuners beside `MicroBatching`: the learning rate finder works, the batch size finder is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit import MemFit, MicroBatching
from tests.helpers.fitting import Tagger
from tests.helpers.trainers import difference, quiet_trainer


class Tuned(Tagger):
    """A tagger with a learning rate."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def trainer_in(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return quiet_trainer(*callbacks, precision="64-true", default_root_dir=folder, max_epochs=20, **options)


def finder() -> LearningRateFinder:
    return LearningRateFinder(num_training_steps=20, early_stop_threshold=None)


@pytest.mark.nightly
@pytest.mark.parametrize("is_first", [True, False])
def test_the_learning_rate_finder_finds_what_it_finds_without_micro_batches(is_first: bool, tmp_path: Path) -> None:
    plain, split = Tuned(), Tuned()
    expected, found, callback = finder(), finder(), MicroBatching(micro_batch_size=5)
    order = (found, callback) if is_first else (callback, found)
    for module, callbacks in ((plain, (expected,)), (split, order)):
        trainer = trainer_in(tmp_path, *callbacks)
        trainer.fit(module)
    assert found.optimal_lr.suggestion() == expected.optimal_lr.suggestion() == split.lr != 1e-3
    assert found.optimal_lr.results["loss"] == pytest.approx(expected.optimal_lr.results["loss"], abs=1e-9)
    assert difference(plain, split) < 1e-9
    assert callback.micro_batch_size_in_use == 5
    assert trainer.global_step > 0


def test_lr_find_and_the_run_after_it(tmp_path: Path) -> None:
    plain, split = Tuned(), Tuned()
    suggestions = []
    for module, callbacks in ((plain, ()), (split, (MicroBatching(micro_batch_size=5),))):
        trainer = trainer_in(tmp_path, *callbacks)
        found = Tuner(trainer).lr_find(module, num_training=20, early_stop_threshold=None)
        assert found is not None
        suggestions.append(found.suggestion())
        trainer.fit(module)
    assert suggestions[0] == suggestions[1]
    assert difference(plain, split) < 1e-9


@pytest.mark.nightly
def test_the_size_found_for_the_finder_serves_training(tmp_path: Path) -> None:
    callback = MicroBatching(limit_bytes=40_000)
    trainer_in(tmp_path, callback, finder()).fit(Tuned())
    reasons = [reason for _, _, reason in callback.changes]
    assert len(reasons) == 2
    assert "prediction" in reasons[0]
    assert "as in the checkpoint" in reasons[1]


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_the_batch_size_finder_is_refused_in_words(method: str, tmp_path: Path) -> None:
    class Validated(Tuned):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.net(batch["input_ids"]).mean())

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.dataset, self.batch_size)

    with pytest.raises(MisconfigurationException, match="BatchSizeFinder.*Leave the finder out"):
        getattr(trainer_in(tmp_path, MicroBatching(), BatchSizeFinder()), method)(Validated())
    with pytest.raises(MisconfigurationException, match=r"scale_batch_size.*Leave the finder out"):
        Tuner(trainer_in(tmp_path, MicroBatching())).scale_batch_size(Validated(), method=method)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_mem_fit_beside_the_finders(tmp_path: Path) -> None:
    module, found = Tuned(), finder()
    trainer_in(tmp_path, MemFit(allow=["exact"], host_memory="1GiB"), found).fit(module)
    assert found.optimal_lr.suggestion() == module.lr != 1e-3
    with pytest.raises(MisconfigurationException, match="Leave the finder out"):
        trainer_in(tmp_path, MemFit(), BatchSizeFinder()).fit(Tuned())
