import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_memfit.techniques.core.facts import LoaderFacts
from lightning_memfit.techniques.data_loading import DataLoading, refusal
from tests.contract.runs import trainer


class Numbers(pl.LightningModule):
    """Remembers the batches it was trained on, and by how many workers they were made."""

    def __init__(self, loaders):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.loaders = loaders
        self.seen = []

    def train_dataloader(self):
        return self.loaders

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        return (self.weight * 0).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8))


def shuffled(**kwargs):
    return DataLoader(torch.arange(12), batch_size=3, shuffle=True, **kwargs)


def ordered():
    return DataLoader(torch.arange(12), batch_size=3)


def run(loaders, *callbacks, **kwargs):
    pl.seed_everything(1, verbose=False)
    module = Numbers(loaders)
    trainer(callbacks, max_steps=-1, max_epochs=2, **kwargs).fit(module)
    return module.seen


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (shuffled, {}),
        (shuffled, {"num_workers": 1}),
        (shuffled, {"num_workers": 0}),
        (ordered, {"persistent_workers": True}),
    ],
)
def test_batches_and_their_order_stay_and_the_loader_is_put_back(make, arguments):
    loader, reference = make(), make()
    before = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    ours, plain = run(loader, DataLoading(**arguments)), run(reference)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert {name: value for name, value in vars(loader).items() if name != "_iterator"} == before
    assert loader._iterator is None


def test_workers_work_and_persist():
    found = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            [loader] = trainer.fit_loop._combined_loader.flattened
            found.append((loader.num_workers, loader.persistent_workers, loader._iterator is not None))

    run(ordered(), DataLoading(2, persistent_workers=True), Watch())
    assert set(found) == {(2, True, True)}


def test_several_loaders():
    seen = run({"a": ordered(), "b": ordered()}, DataLoading(1))
    assert torch.equal(seen[0]["a"], seen[0]["b"])


def test_what_would_change_the_data_is_refused():
    stream = DataLoader(Stream(), batch_size=2)
    assert "IterableDataset" in refusal(LoaderFacts.of(stream), 2)
    assert refusal(LoaderFacts.of(stream), 1) is None
    with pytest.raises(ValueError, match="no torch DataLoader"):
        run([torch.ones(2)], DataLoading())
    with pytest.raises(ValueError, match="num_workers=-1"):
        DataLoading(-1)
