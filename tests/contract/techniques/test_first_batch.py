import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_memfit.fitting.auto import MemFit
from lightning_memfit.fitting.size.prediction import MemoryPrediction
from lightning_memfit.fitting.step.callback import MicroBatching
from lightning_memfit.techniques.core.first_batch import first_batch
from tests.contract.runs import LanguageModel, trainer


class Read(pl.Callback):
    """Reads in `setup`, as techniques do, and collects what the run gets."""

    def __init__(self):
        self.read = None
        self.batches = []

    def setup(self, trainer, pl_module, stage):
        numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
        states = torch.get_rng_state(), random.getstate()
        self.read = first_batch(trainer)
        assert torch.equal(states[0], torch.get_rng_state())
        assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002
        assert states[1] == random.getstate()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)


class Idle(LanguageModel):
    def training_step(self, batch, batch_idx):
        return None


def run(data, reader=True):
    callback = Read()
    if not reader:
        callback.setup = lambda *args, **kwargs: None
    torch.manual_seed(0)
    trainer([callback], max_epochs=1, max_steps=-1).fit(Idle(n_layer=1), data)
    return callback


def shuffled(generator):
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True, generator=generator)


@pytest.mark.parametrize("own_generator", [True, False])
def test_the_run_gets_the_batches_it_would_have_got(own_generator):
    generators = [torch.Generator().manual_seed(5) if own_generator else None for _ in range(2)]
    ours, plain = run(shuffled(generators[0])), run(shuffled(generators[1]), reader=False)
    assert ours.read[0].shape == (2,)
    assert torch.equal(ours.batches[0][0], plain.batches[0][0])


def test_an_iterator_is_not_used_up():
    callback = run(iter([torch.ones(2), torch.zeros(2)]))
    assert callback.read.tolist() == [1, 1]
    assert [batch.tolist() for batch in callback.batches] == [[1, 1], [0, 0]]


def test_empty_data_is_refused():
    with pytest.raises(ValueError, match="empty"):
        run([])


# --- the data are as they were ----------------------------------------------------------------------------------------

CALLS = []


class OneShot(IterableDataset):
    """Goes on where it was, as a stream does."""

    def __init__(self):
        self.numbers = list(range(64))

    def __iter__(self):
        while self.numbers:
            yield torch.tensor([float(self.numbers.pop(0))])


class Counting(Dataset):
    """Gives other samples every time."""

    total = 0

    def __init__(self):
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(0)
        self.seen = []

    def __len__(self):
        return 64

    def __getitem__(self, place):
        self.calls += 1
        Counting.total += 1
        CALLS.append(place)
        self.seen.append(place)
        drawn = torch.rand((), generator=self.generator).item() + self.numbers.random()
        return torch.tensor([self.calls + Counting.total + len(CALLS) + drawn])


class Batches:
    """No DataLoader; gives other batches in every epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        for number in range(8):
            yield torch.full((2, 1), float(self.epoch + number))


LOADERS = {
    "stream": lambda: DataLoader(OneShot(), batch_size=2),
    "counters": lambda: DataLoader(Counting(), batch_size=2, shuffle=True),
    "no loader": lambda: Batches(),
}


class Regression(pl.LightningModule):
    """Fits numbers, and remembers them."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        batch = batch[0] if isinstance(batch, list) else batch
        self.batches.append(batch.clone())
        return self.net(batch / 64).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader, self.opened = loader, 0

    def train_dataloader(self):
        self.opened += 1
        return self.loader


def trained(loader, *callbacks):
    Counting.total = 0
    CALLS.clear()
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    module, data = Regression(), Data(loader)
    trainer(callbacks, max_epochs=2, max_steps=6).fit(module, data)
    assert data.opened == 1
    return module


@pytest.mark.nightly_cases("<lambda>-counters", "<lambda>-no loader")
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("make", [MemoryPrediction, MicroBatching, lambda: MemFit(allow=["exact"])])
def test_training_sees_the_same_data(make, name):
    plain, ours = trained(LOADERS[name]()), trained(LOADERS[name](), make())
    assert len(plain.batches) == len(ours.batches) == 6
    for one, other in zip(plain.batches, ours.batches, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(plain.net.weight, ours.net.weight, rtol=1e-4, atol=0)  # `MemFit` fuses the optimizer


class Writing(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        Path(f"{place}.txt").write_text("x")
        return torch.tensor([float(place)])


def test_what_can_not_be_read_unchanged_is_refused_trained_and_predicted_from_its_first_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, callback = trained(DataLoader(Writing(), batch_size=2)), MemoryPrediction()
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.warns(UserWarning, match="comes with the first batch of training.*it would write to '0.txt'"):
        ours = trained(DataLoader(Writing(), batch_size=2), callback)
    readable = MemoryPrediction()
    trained(DataLoader([torch.tensor([float(number)]) for number in range(64)], batch_size=2), readable)
    kept = 64 * 8  # batches of an epoch that the module keeps, where its length is known
    assert callback.estimate.allocated_bytes == pytest.approx(readable.estimate.allocated_bytes, abs=kept)
    assert vars(callback)["on_train_batch_start"] is None
    for one, other in zip(plain.batches, ours.batches, strict=True):
        assert torch.equal(one, other)
