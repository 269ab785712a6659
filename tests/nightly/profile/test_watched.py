"""What a step, or a hook, does once in a while is in the figures, whatever it counts by."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, SequentialLR, StepLR

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.profile.watched import AskedNumbers, WatchedFloat, WatchedInt
from tests.helpers.trainers import quiet_trainer
from tests.truth.profile.modules import CLASSES, WIDTH, Classifier, batch, true_peak


def figures(make_module, callbacks=(), **options):
    """Peaks by a trace and by a measurement, and what the trace says."""
    profiles = []
    for profile in (
        lambda module: profile_module(module, batch(), emulation=Emulation("cpu"), any_micro_batch=False),
        lambda module: measure_step(module, batch()),
    ):
        module = make_module()
        if callbacks or options:
            module.trainer = quiet_trainer(*(make() for make in callbacks), **(options or {"max_epochs": 1}))
        profiles.append(profile(module))
    return [estimate_step(profile).allocated_bytes for profile in profiles], profiles[0]


class Larger(Classifier):
    def larger(self, batch, is_larger):
        loss = self.loss(batch)
        return loss + self.net(batch["x"].repeat(6, 1)).mean() if is_larger else loss


class Counts(Larger):
    def __init__(self):
        super().__init__()
        self.n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        return self.larger(batch, self.n % 5 == 0)


class CountsDown(Larger):
    def __init__(self):
        super().__init__()
        self.left = 9

    def training_step(self, batch, batch_idx):
        self.left -= 1
        return self.larger(batch, not self.left)


class OtherRemainder(Counts):
    def training_step(self, batch, batch_idx):
        self.n += 1
        return self.larger(batch, self.n % 11 == 6)


class Anneals(Larger):
    def __init__(self):
        super().__init__()
        self.share = 0.0

    def training_step(self, batch, batch_idx):
        self.share += 0.1
        return self.larger(batch, self.share > 0.75)


class InADict(Larger):
    def __init__(self):
        super().__init__()
        self.state = {"n": 0}

    def training_step(self, batch, batch_idx):
        self.state["n"] = (self.state["n"] + 1) % 6
        return self.larger(batch, self.state["n"] == 0)


class InItsClass(Larger):
    n = 0

    def training_step(self, batch, batch_idx):
        InItsClass.n += 1
        return self.larger(batch, InItsClass.n == 7)


class InABuffer(Larger):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.n += 1
        return self.larger(batch, self.n.item() > 3)


class InAFloatBuffer(Larger):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        larger = self.larger(batch, self.n % 7 == 4)
        self.n.add_(1)
        return larger


class SinceTheLast(Counts):
    last = 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        is_larger = self.n - self.last >= 6
        if is_larger:
            self.last = self.n
        return self.larger(batch, is_larger)


class LastBatch(Larger):
    def training_step(self, batch, batch_idx):
        return self.larger(batch, self.trainer.is_last_batch)


@pytest.mark.parametrize(
    "module",
    [
        Counts,
        CountsDown,
        OtherRemainder,
        Anneals,
        InADict,
        InItsClass,
        InABuffer,
        InAFloatBuffer,
        SinceTheLast,
        LastBatch,
    ],
)
def test_a_module_may_count_by_itself(module):
    found, profile = figures(module)
    InItsClass.n = 0
    truth = true_peak(module, batch, 14)
    InItsClass.n = 0
    assert found == pytest.approx([truth] * 2, rel=1e-3)
    assert "tried" in profile.cautions[0]


class CountsInVain(Counts):
    def training_step(self, batch, batch_idx):
        self.n += 1
        return self.loss(batch)


def test_a_counter_that_decides_nothing_costs_nothing():
    _, profile = figures(CountsInVain)
    assert (profile.traced_batches, profile.cautions) == (2, ())


class Normalizes(Classifier):
    def __init__(self):
        super().__init__()
        self.net.append(nn.BatchNorm1d(WIDTH))


def test_batch_normalization_counts_in_vain():
    found, profile = figures(Normalizes)
    assert (profile.traced_batches, profile.cautions) == (2, ())
    assert found == pytest.approx([true_peak(Normalizes, batch, 3)] * 2, rel=0.01)


class Toggles(Classifier):
    mode = "a"

    def training_step(self, batch, batch_idx):
        self.mode = chr(ord(self.mode) + 1)
        return self.loss(batch)


def test_words_that_change_with_every_batch_are_named():
    _, profile = figures(Toggles)
    assert "`mode` changes with every batch" in profile.cautions[0]


class ActsAtTheEnd(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.kept = batch["x"].repeat(400, 1) if batch_idx % 3 == 2 else None


class ActsAtTheStart(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.kept = batch["x"].repeat(400, 1) if batch_idx == 4 else None


class CountsItself(pl.Callback):
    seen = 0

    def on_after_backward(self, trainer, pl_module):
        self.seen += 1
        self.kept = torch.zeros(100_000) if self.seen == 6 else None


@pytest.mark.parametrize("kind", [ActsAtTheEnd, ActsAtTheStart, CountsItself])
def test_a_callback_may_act_in_some_batches(kind):
    found, _ = figures(Classifier, [kind])
    assert found == pytest.approx([true_peak(Classifier, batch, 8, callbacks=[kind()])] * 2, rel=1e-3)


class Backbone(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.backbone(batch["x"])), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 3:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class ActsFromTheThird(Larger):
    def on_train_epoch_start(self):
        self.is_larger = self.current_epoch >= 2

    def training_step(self, batch, batch_idx):
        return self.larger(batch, self.is_larger)


class CountsEpochs(Larger):
    epochs = 0

    def on_train_epoch_start(self):
        self.epochs += 1

    def training_step(self, batch, batch_idx):
        return self.larger(batch, self.epochs == 4)


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [
        (Backbone, [Unfreezes]),
        (Backbone, [lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=4)]),
        (ActsFromTheThird, []),
        (CountsEpochs, []),
    ],
)
def test_later_epochs_count(module, callbacks):
    truth = true_peak(module, batch, 3, max_epochs=6, callbacks=[make() for make in callbacks])
    found, profile = figures(module, callbacks, max_epochs=6)
    assert found == pytest.approx([truth] * 2, rel=1e-3)
    assert "in epoch" in profile.cautions[0]
    shorter, _ = figures(module, callbacks, max_epochs=2)
    assert max(shorter) < 0.9 * truth


class FailsLater(Classifier):
    def on_train_epoch_start(self):
        self.weight = [1.0][self.current_epoch]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.weight


def test_an_epoch_that_ends_in_an_error_is_named():
    found, profile = figures(FailsLater)
    assert found == pytest.approx(figures(Classifier)[0], rel=1e-3)
    assert "IndexError" in profile.cautions[0]


def test_counters_tell_the_turns_in_which_they_matter():
    asked = AskedNumbers()
    left = WatchedInt.of(10, asked)
    assert left - 1 != 0
    assert 9 in asked.telling_turns(10, -1, None)
    asked = AskedNumbers()
    assert WatchedFloat.of(0.1, asked) + 0.1 < 0.75
    assert {5, 6} <= set(asked.telling_turns(0.1, 0.1, None))
    asked = AskedNumbers()
    assert WatchedInt.of(2, asked) % 10 != 6
    assert 4 in asked.telling_turns(2, 1, None)
    assert asked.telling_turns(2, 1, 3) == [3]


class EveryFifth(torch.optim.SGD):
    """Precomputes something large in every fifth step, as preconditioners and averages of weights do."""

    kept: object = None

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        loss = super().step(closure)
        self.kept = torch.zeros(200_000) if self.is_fifth() else None
        return loss

    def parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]


class ByItself(EveryFifth):
    k = 0

    def is_fifth(self):
        self.k += 1
        return self.k % 5 == 0


class ByItsGroups(EveryFifth):
    def is_fifth(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return self.param_groups[0]["k"] % 5 == 0


class ByItsStates(EveryFifth):
    def is_fifth(self):
        for parameter in self.parameters():
            self.state[parameter]["t"] = self.state[parameter].get("t", 0) + 1
        return self.state[self.parameters()[0]]["t"] % 5 == 0


class ByATensor(EveryFifth):
    def is_fifth(self):
        for parameter in self.parameters():
            self.state[parameter].setdefault("step", torch.zeros(())).add_(1)
        return self.state[self.parameters()[0]]["step"] % 5 == 0


class ByAdamsTensor(torch.optim.AdamW):
    def step(self, closure=None):
        loss = super().step(closure)
        self.kept = torch.zeros(200_000) if next(iter(self.state.values()))["step"] % 5 == 0 else None
        return loss


class Wraps(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.inner = ByItself(parameters)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def trained_by(optimizer, base=Classifier):
    return type("Trained", (base,), {"configure_optimizers": lambda self: optimizer(self.parameters())})


@pytest.mark.parametrize("optimizer", [ByItself, ByItsGroups, ByItsStates, ByATensor, ByAdamsTensor, Wraps])
def test_an_optimizer_may_count_by_itself(optimizer):
    found, profile = figures(trained_by(optimizer))
    assert found == pytest.approx([true_peak(trained_by(optimizer), batch, 7)] * 2, rel=1e-3)
    assert "which counts" in profile.cautions[0]


class StepsInTurn(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        often, seldom = self.optimizers()
        self.manual_backward(self.loss(batch))
        (seldom if batch_idx % 3 == 2 else often).step()
        self.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1), ByItsStates(self.head.parameters())


def test_optimizers_that_step_in_turn_are_followed_to_their_numbers():
    found, _ = figures(StepsInTurn)
    assert found == pytest.approx([true_peak(StepsInTurn, batch, 18)] * 2, rel=1e-3)


def test_torchs_own_optimizers_count_in_vain():
    _, profile = figures(trained_by(torch.optim.AdamW))
    assert (profile.traced_batches, profile.cautions) == (2, ())


class BelowARate(Classifier):
    def __init__(self):
        super().__init__()
        self.large = nn.Linear(WIDTH, 2048)  # its gradients and states come with its first step

    def rate(self):
        return self.optimizers().param_groups[0]["lr"]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + self.large(batch["x"].repeat(6, 1)).mean() if self.rate() < 0.05 else loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = StepLR(optimizer, 5, 0.1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class BelowALastRate(BelowARate):
    def rate(self):
        return self.lr_schedulers().get_last_lr()[0]


class BelowARateOfASequence(BelowARate):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        parts = [
            ConstantLR(optimizer, 1, 1),
            CosineAnnealingLR(optimizer, 4),
        ]
        schedule = SequentialLR(optimizer, parts, [3])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("module", [BelowARate, BelowALastRate, BelowARateOfASequence])
def test_a_step_may_act_on_its_learning_rate(module):
    found, profile = figures(module, max_steps=8)
    assert found == pytest.approx([true_peak(module, batch, 8)] * 2, rel=1e-3)
    assert "learning rate" in profile.cautions[0]
    assert figures(module, max_steps=3)[0] == pytest.approx([true_peak(module, batch, 3)] * 2, rel=1e-3)


class InTheLoop(Larger):
    read = staticmethod(lambda loop: loop.epoch_loop.total_batch_idx)

    def training_step(self, batch, batch_idx):
        return self.larger(batch, self.read(self.trainer.fit_loop) % 7 == 6)


class InTheLoopOfEpochs(InTheLoop):
    read = staticmethod(lambda loop: loop.total_batch_idx)


class InItsProgress(InTheLoop):
    read = staticmethod(lambda loop: loop.epoch_loop.batch_progress.current.ready - 1)


class InACallback(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.kept = batch["x"].repeat(400, 1) if trainer.fit_loop.epoch_loop.batch_idx == 5 else None


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [(InTheLoop, []), (InTheLoopOfEpochs, []), (InItsProgress, []), (Classifier, [InACallback])],
)
def test_a_step_may_read_the_numbers_of_lightnings_loops(module, callbacks):
    truth = true_peak(module, batch, 8, callbacks=[make() for make in callbacks])
    found, profile = figures(module, callbacks)
    assert found == pytest.approx([truth] * 2, rel=1e-3)
    assert "number of its batch" in profile.cautions[0]


class TakesTurns(Larger):
    def __init__(self):
        super().__init__()
        self.turns = itertools.cycle([False] * 11 + [True])

    def training_step(self, batch, batch_idx):
        return self.larger(batch, next(self.turns))


def ticking():
    ticks = iter(range(10**9))
    return lambda: next(ticks)


TICK = ticking()


class TicksOutside(Larger):
    def training_step(self, batch, batch_idx):
        return self.larger(batch, TICK() % 12 == 11)


class CountsWhatItKeeps(Larger):
    def __init__(self):
        super().__init__()
        self.history = []

    def training_step(self, batch, batch_idx):
        self.history.append(0.0)
        return self.larger(batch, len(self.history) % 12 == 0)


@pytest.mark.parametrize(
    ("module", "name"),
    [(TakesTurns, "`turns`"), (TicksOutside, "ticks`"), (CountsWhatItKeeps, "`history`")],
)
def test_what_counts_but_can_not_be_set_is_named(module, name):
    profile = profile_module(module(), batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    assert f"{name} changes with every batch" in profile.cautions[0]


class KeepsForItsEpoch(Classifier):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        self.losses.append(0.0)
        return self.loss(batch)

    def on_train_epoch_end(self):
        self.log("mean", sum(self.losses) / len(self.losses))


def test_what_is_kept_for_the_end_of_an_epoch_is_no_counter():
    profile = profile_module(KeepsForItsEpoch(), batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    assert not any("changes" in caution for caution in profile.cautions)


class ActsOnItsBatch(Larger):
    def training_step(self, batch, batch_idx):
        return self.larger(batch, (batch["y"] > CLASSES).any())


def test_a_branch_on_the_batch_is_named():
    profile = profile_module(ActsOnItsBatch(), batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    assert "condition on the batch was False" in profile.cautions[0]
    assert "test_watched.py" in profile.cautions[0]
