"""The attachment is active inside the strategy's steps only, nests, and leaves the strategy as it was."""

import dataclasses
from collections import UserDict
from collections.abc import Mapping

import pytest
import torch

from lightning_memfit.memory import Category
from lightning_memfit.memory.attach import TrainerAttachment
from lightning_memfit.memory.ledger import StorageLedger


class Strategy:
    """The part of a strategy that the attachment touches."""

    root_device = torch.device("cpu")

    def training_step(self, size):
        self.output = torch.zeros(size)
        return self.output

    def optimizer_step(self, closure):
        return closure()

    def batch_to_device(self, batch, dataloader_idx=0):
        return batch

    def backward(self, loss):
        raise RuntimeError("out of luck")

    def validation_step(self):
        pass

    test_step = predict_step = validation_step


def test_steps_are_followed_once_even_when_nested():
    strategy, ledger = Strategy(), StorageLedger()
    attachment = TrainerAttachment(ledger, strategy)
    strategy.optimizer_step(lambda: strategy.training_step(100))
    assert ledger.live_bytes == 400
    outside = torch.zeros(1000)
    assert not ledger.is_tracked(outside)
    attachment.detach()
    strategy.training_step(1000)
    assert ledger.peak_bytes == 400
    assert not {"training_step", "optimizer_step", "batch_to_device"} & set(vars(strategy))


def test_batches_are_copied_and_counted():
    strategy, ledger = Strategy(), StorageLedger()
    TrainerAttachment(ledger, strategy)
    dataset = torch.arange(1000)
    batch = strategy.batch_to_device({"x": dataset[:10], "names": ["a"]}, dataloader_idx=0)
    assert torch.equal(batch["x"], dataset[:10])
    assert ledger.live_by_category[Category.INPUT] == 80
    assert not ledger.is_tracked(dataset)
    del batch
    assert ledger.live_bytes == 0


class Batched(UserDict):
    """Knows more than its items, which its constructor asks for, as `TensorDict` and `BatchEncoding` do."""

    def __init__(self, items, batch_size):
        super().__init__(items)
        self.batch_size = batch_size


class Fixed(Mapping):
    """A mapping that can't be written to."""

    def __init__(self, only):
        self.only = only

    def __getitem__(self, key):
        return self.only

    def __iter__(self):
        return iter(["only"])

    def __len__(self):
        return 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    names: list[str]


def test_batches_stay_of_their_classes():
    strategy, ledger = Strategy(), StorageLedger()
    TrainerAttachment(ledger, strategy)
    batches = [Batched({"x": torch.ones(4), "n": 3}, (4,)), Fixed(torch.ones(4)), Frozen(torch.ones(4), ["a"])]
    written, fixed, frozen = strategy.batch_to_device(batches)
    assert type(written) is Batched
    assert written.batch_size == (4,)
    assert written["n"] == 3
    assert type(fixed) is Fixed
    assert type(frozen) is Frozen
    assert frozen.names is batches[2].names
    for found in (written["x"], frozen.x):
        assert ledger.is_tracked(found)
    assert not ledger.is_tracked(batches[0]["x"])


def test_an_exception_leaves_the_mode():
    strategy, ledger = Strategy(), StorageLedger()
    TrainerAttachment(ledger, strategy)
    with pytest.raises(RuntimeError):
        strategy.backward(None)
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    strategy.training_step(4)
    assert ledger.live_bytes == 16
