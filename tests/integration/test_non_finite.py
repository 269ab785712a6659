"""Steps whose gradients are no numbers change nothing, on all ranks, and end the run if they don't stop."""

import os

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_memfit import MicroBatching, NonFiniteGuard
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer


class Breaks(LightningModule):
    """Has a loss that is no number in some steps, on some ranks."""

    def __init__(self, steps, rank=0):
        super().__init__()
        self.steps, self.rank = steps, rank
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        output = self.last(self.first(batch)).square().mean()
        return output * (float("nan") if batch_idx in self.steps and self.global_rank == self.rank else 1.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def train(module, *callbacks, **options):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    trainer = quiet_trainer(*callbacks, max_epochs=1, **options)
    trainer.fit(module, DataLoader(data, batch_size=4))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("more", [(), (MicroBatching(micro_batch_size=2),)])
def test_a_step_is_left_out(more):
    guard = NonFiniteGuard()
    with pytest.warns(UserWarning, match=r"step 3: gradients are not finite, first in parameter order `first.weight`"):
        weights = train(Breaks({3}), *more, guard)
    assert guard.skipped == [3]
    assert weights.isfinite().all()
    assert not train(Breaks({3}), *more).isfinite().all()  # without it all is lost


def test_several_in_a_row_end_the_run(tmp_path):
    guard = NonFiniteGuard(patience=3, dirpath=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"3 steps in a row.*last good step are in .*non-finite-step=4.ckpt"):
        train(Breaks(set(range(2, 8))), guard)
    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


def test_single_ones_do_not(tmp_path):
    guard = NonFiniteGuard(patience=2)
    train(Breaks({1, 3, 5}), guard)
    assert guard.skipped == [1, 3, 5]


def test_half_precision_with_a_scaler():
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    guard = NonFiniteGuard(patience=1)
    assert train(Breaks({2}), guard, plugins=[scaled]).isfinite().all()
    assert guard.skipped[-1:] == [2]


def on_two():
    guard = NonFiniteGuard()
    strategy = DDPStrategy(process_group_backend="gloo")
    weights = train(Breaks({2}, rank=1), guard, devices=2, strategy=strategy)
    return os.environ["RANK"], guard.skipped, weights.tolist()


def test_ranks_agree(tmp_path):
    first, second = (ended.result for ended in run_ranks(on_two, 2, tmp_path))
    assert first[1:] == second[1:]
    assert first[1] == [2]


def test_sparse_gradients_are_looked_at():
    class Embeds(LightningModule):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(8, 2, sparse=True)

        def training_step(self, batch, batch_idx):
            factor = torch.nan if batch_idx == 1 else 1.0
            return (self.table(torch.tensor([1, 1, 3])) * factor).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    guard, module = NonFiniteGuard(), Embeds()
    quiet_trainer(guard, max_steps=3, limit_val_batches=0).fit(module, torch.utils.data.DataLoader(range(3)))
    assert guard.skipped == [1]
    assert module.table.weight.isfinite().all()


def test_patience():
    with pytest.raises(ValueError, match="`patience=0` must be at least 1"):
        NonFiniteGuard(patience=0)
