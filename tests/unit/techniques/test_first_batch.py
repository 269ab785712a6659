import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memfit.techniques.core.first_batch import first_batch
from tests.techniques.runs import LanguageModel, trainer


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(10))


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


def test_iterable_data():
    callback = run(DataLoader(Count(), batch_size=3))
    assert callback.read.tolist() == callback.batches[0].tolist() == [0, 1, 2]


def test_a_list_of_batches():
    assert run([torch.ones(2), torch.zeros(2)]).read.tolist() == [1, 1]


def test_an_iterator_is_refused():
    with pytest.raises(ValueError, match="use it up"):
        run(iter([torch.ones(2)]))


def test_empty_data_is_refused():
    with pytest.raises(ValueError, match="empty"):
        run([])
