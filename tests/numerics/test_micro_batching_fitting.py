"""Finding the micro-batch size on a simulated device, and everything around it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting import MicroBatching
from tests.helpers.fitting import Tagger
from tests.helpers.trainers import difference, fit, fit_on_two_ranks, quiet_trainer

LIMIT = "500KiB"


class Wide(pl.LightningModule):
    """Activations far larger than weights, dropout, a metric of Python's own, a shuffled loader."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 4))
        self.batch_size = batch_size
        self.calls: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.calls.append(len(batch[0]))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(
            torch.randn(256, 16, generator=generator), torch.randint(0, 4, (256,), generator=generator)
        )
        return DataLoader(data, self.batch_size, shuffle=True)


def seeded_fit(module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    pl.seed_everything(7, verbose=False)
    return fit(module, *callbacks, **kwargs)


@pytest.mark.nightly
def test_the_run_is_bitwise_the_run_started_by_hand() -> None:
    fitted, by_hand = Wide(), Wide()
    callback = MicroBatching()
    trainer = seeded_fit(fitted, callback, MemoryLimit(LIMIT))
    assert callback.found is not None
    assert 1 < callback.changes[0][1] < 64
    size = callback.changes[0][1]
    hand = seeded_fit(by_hand, MicroBatching(micro_batch_size=size), MemoryLimit(LIMIT))
    assert difference(fitted, by_hand) == 0.0
    assert fitted.calls == by_hand.calls
    assert trainer.callback_metrics == hand.callback_metrics
    assert "500.00 KiB have room for" in callback.description


def test_two_ranks_agree_on_the_size(tmp_path: Path) -> None:
    class Pair(Wide):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.global_rank == 1 and len(batch[0]) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    (first, _), (second, _) = fit_on_two_ranks(Pair(), tmp_path, MicroBatching(limit_bytes=1 << 30), max_epochs=1)
    assert difference(first, second) == 0.0


@pytest.mark.nightly
def test_size_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    first = MicroBatching()
    whole = Wide()
    seeded_fit(whole, first, MemoryLimit(LIMIT), checkpoint, enable_checkpointing=True, max_epochs=2)
    path = tmp_path / "step=4.ckpt"
    again, resumed = MicroBatching(), Wide()
    trainer = quiet_trainer(again, MemoryLimit(LIMIT), max_epochs=2)
    trainer.fit(resumed, ckpt_path=path)
    assert again.found is None
    assert again.changes[0][1] == first.changes[0][1]
    assert "as in the checkpoint" in again.description
    assert trainer.global_step == 8
    other = MicroBatching()
    quiet_trainer(other, MemoryLimit("350KiB"), max_epochs=2).fit(Wide(), ckpt_path=path)
    assert other.found is not None
    assert other.changes[0][1] < again.changes[0][1]


def test_global_batch_size_is_checked_and_lent() -> None:
    module = Tagger(batch_size=5)
    fit(module, MicroBatching(global_batch_size=16, micro_batch_size=4), accumulate_grad_batches=2, max_epochs=1)
    assert module.batch_size == 5  # 8 while training
    loader = DataLoader(Tagger().dataset, 5)
    with pytest.raises(MisconfigurationException, match=r"global_batch_size=16.*5 x 1 devices.*= 5.*to 16"):
        fit(Tagger(), MicroBatching(global_batch_size=16), loader=loader)
    with pytest.raises(MisconfigurationException, match=r"`global_batch_size=15` can't be divided by 1 devices.*=2"):
        fit(Tagger(), MicroBatching(global_batch_size=15), accumulate_grad_batches=2)


def test_datamodule_with_batch_size() -> None:
    class Data(pl.LightningDataModule):
        batch_size = 3

        def train_dataloader(self) -> DataLoader:
            return DataLoader(Tagger().dataset, self.batch_size)

    module, data = Tagger(), Data()
    quiet_trainer(MicroBatching(global_batch_size=16, micro_batch_size=4), max_epochs=2).fit(module, datamodule=data)
    reference = Tagger()
    fit(reference)
    assert data.batch_size == 3
    assert difference(module, reference) < 1e-6


class Batches:
    """A loader that is nothing but iterable."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize("kind", ["loader", "batches", "stream"])
def test_any_loader_passed_to_fit(kind: str) -> None:
    samples = [Tagger().dataset[index] for index in range(48)]

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(samples)

    loaders = {
        "loader": DataLoader(samples, 16),
        "batches": Batches(DataLoader(samples, 16)),
        "stream": DataLoader(Stream(), 16),
    }
    module, reference = Tagger(), Tagger()
    fit(module, MicroBatching(), MemoryLimit("64KiB"), loader=loaders[kind])
    fit(reference)
    assert difference(module, reference) < 1e-6


def test_what_cannot_be_exact_is_refused() -> None:
    class Normed(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.norm(self.net(batch["input_ids"])).square().mean()

    class Contrastive(Tagger):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            rows = nn.functional.normalize(self.net(batch["input_ids"]).mean(1))
            return nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    class Summed(Tagger):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.net(batch["input_ids"]).square().sum()

    whole, split = Summed(), Summed()
    fit(whole)
    fit(split, MicroBatching(micro_batch_size=4))
    assert difference(whole, split) < 2e-6
    fit(Normed(), MicroBatching(micro_batch_size=4, allow_batch_statistics=True), max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"contrastive losses"):  # statistics and nothing else
        fit(Contrastive(), MicroBatching(micro_batch_size=4, allow_batch_statistics=True))


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(ValueError, match="`micro_batch_size=0`"):
        MicroBatching(micro_batch_size=0)
    with pytest.raises(ValueError, match="`global_batch_size=-1`"):
        MicroBatching(global_batch_size=-1)


def test_without_a_limit_the_whole_share_is_taken() -> None:
    callback = MicroBatching()
    fit(Tagger(), callback, max_epochs=1)
    assert callback.changes == [(0, 16, callback.description)]
    assert "no memory limit is known for cpu" in callback.description


def test_other_errors_of_micro_batches_end_the_run_before_weights_change() -> None:
    class Broken(Wide):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 1:
                raise KeyError("no such key")
            return loss

    module = Broken()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises((KeyError, MisconfigurationException), match="no such key"):
        fit(module, MicroBatching(), MemoryLimit(LIMIT))
    assert difference(module, before) == 0.0


# --- what a search must not take for a shortage of memory -------------------------------------------------------------


class Sparse(pl.LightningModule):
    """Its optimizer step is the peak, the same for 1 to 48 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(96, 768, bias=False)
        self.decoder = nn.Linear(768, 96, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.decoder(_TopK.apply(self.encoder(batch), 24)), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Muon(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(192, 96), batch_size=48)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        values, index = x.topk(k, -1)
        ctx.save_for_backward(index)
        ctx.shape, ctx.note = x.shape, x * 2
        return torch.zeros_like(x).scatter(-1, index, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=gradient.dtype).scatter(-1, index, gradient.gather(-1, index)), None


@pytest.mark.nightly
def test_where_the_optimizer_step_is_the_peak_every_size_fits() -> None:
    def fitted(limit_bytes: int, size: Any = "auto") -> tuple[MicroBatching, MemoryLimit]:
        limit, callback = MemoryLimit(limit_bytes), MicroBatching(micro_batch_size=size)
        seeded_fit(Sparse(), callback, limit, max_steps=8, max_epochs=-1)
        return callback, limit

    peaks = []
    for size in (1, 48):
        ledger = fitted(1 << 40, size)[1].ledger
        assert ledger is not None
        peaks.append(ledger.peak_bytes)
    for share in (1.0, 1.02, 1.1):
        found = fitted(int(max(peaks) * share))[0].found
        assert found is not None
        assert found.tried == 48, share


class Table(pl.LightningModule):
    """Batch norm refuses to run one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))
        self.sizes: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(768, 8)), batch_size=256)


@pytest.mark.nightly_cases("True")
@pytest.mark.parametrize("predicts", [True, False])
def test_sizes_that_the_module_cannot_run_are_left_out(predicts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not predicts:
        monkeypatch.setattr("lightning_memfit.fitting.size.prediction.predict_sizes", lambda *_: None)
    module = Table()
    callback = MicroBatching(allow_batch_statistics=True)
    trainer = seeded_fit(module, callback, MemoryLimit(200_000), max_steps=6, max_epochs=-1)
    assert trainer.global_step == 6
    assert callback.found is not None
    assert 2 < callback.found.tried < 256
    with pytest.raises(MisconfigurationException, match="BatchNorm layers"):
        seeded_fit(Table(), MicroBatching(), MemoryLimit(200_000), max_steps=3)


def test_what_fails_at_every_size_is_raised_as_it_is() -> None:
    class Broken(Table):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise KeyError(f"no column among {len(batch[0])} rows")

    with pytest.raises(KeyError, match="no column among 256 rows"):
        seeded_fit(Broken(), MicroBatching(), MemoryLimit(200_000), max_steps=3)


def test_an_optimizer_step_that_runs_out_is_named() -> None:
    class Heavy(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(nn.Linear(4, 20_000, bias=False))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)Memory ran out in `optimizer.step` twice.*`Optimizer8bit"):
        seeded_fit(Heavy(), MicroBatching(), MemoryLimit("1150KiB"), max_steps=3)
