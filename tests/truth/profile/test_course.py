"""Steps that differ from one another get the figure of a plain Lightning run, by the profiler, or a reason."""

import random

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.memory.cache_files import write_file
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.course import TraceLimits
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import Emulation, TraceError
from tests.helpers.trainers import quiet_trainer

from .modules import CLASSES, WIDTH, Classifier, batch, true_peak


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class EveryFourth(Manual):
    """Lightning's documented accumulation by hand."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 4)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(pl.LightningModule):
    every, at = 1, 0

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        real, (first, second) = batch["x"], self.optimizers()
        noise, ones = torch.randn(len(real), 16), torch.ones(len(real), 1)
        judged = self.critic(torch.cat([real, self.generator(noise).detach()]))
        second.zero_grad()
        self.manual_backward(F.binary_cross_entropy_with_logits(judged, torch.cat([ones, 1 - ones])))
        second.step()
        if batch_idx % self.every == self.at:
            first.zero_grad()
            self.manual_backward(F.binary_cross_entropy_with_logits(self.critic(self.generator(noise)), ones))
            first.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())], []


class GeneratorFirst(TwoOptimizers):
    every, at = 5, 0


class Bank(Classifier):
    """Fills over six steps."""

    def __init__(self):
        super().__init__()
        self.bank = []

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        self.bank = [*self.bank, hidden.detach()][-6:]
        return F.cross_entropy(self.head(hidden), batch["y"])


class Deep(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def runs(self, number):
        return True

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for number, block in enumerate(self.blocks):
            if self.runs(number):
                x = x + F.gelu(block(x))
        return F.cross_entropy(self.head(x), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Quasi(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=4, history_size=10)


class KeepsOutputs(Classifier):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch["x"])
        self.outputs.append(self.net(batch["x"]))
        return F.cross_entropy(self.head(hidden), batch["y"])

    def on_train_epoch_end(self):
        self.outputs.clear()


class KeepsLosses(Classifier):
    """Four bytes a batch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss


class KeepsAFewLosses(KeepsLosses):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        del self.losses[2:]
        return loss


class NeverSteps(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))


class Swallows(Classifier):
    def training_step(self, batch, batch_idx):
        while True:
            try:
                self.loss(batch)
            except Exception:
                continue


class OneIsIdle(TwoOptimizers):
    every, at = 10_000_000, 1


class StepsInItsBackward(Manual):
    """PyTorch's tutorial: every parameter has an optimizer of its own, that Lightning doesn't know."""

    def __init__(self):
        super().__init__()
        self.steps = {weight: torch.optim.Adam([weight], foreach=False) for weight in self.parameters()}
        for weight in self.parameters():
            weight.register_post_accumulate_grad_hook(self.step)

    def step(self, weight):
        self.steps[weight].step()
        weight.grad = None

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))

    def configure_optimizers(self):
        return None


def profiled(module, **options):
    return profile_module(module, batch(), emulation=Emulation("cpu"), any_micro_batch=False, **options)


def figure(profile):
    return estimate_step(profile).allocated_bytes


@pytest.mark.nightly_cases("GeneratorFirst")
@pytest.mark.parametrize(
    ("module", "batches"),
    [
        (EveryFourth, 8),
        (TwoOptimizers, 4),
        (GeneratorFirst, 11),
        (Bank, 9),
    ],
)
def test_steps_that_differ_get_the_peak_of_the_whole_run(module, batches):
    truth = true_peak(module, batch, batches)
    assert figure(profiled(module())) == pytest.approx(truth, rel=1e-3)
    assert figure(measure_step(module(), batch())) == pytest.approx(truth, rel=1e-3)


def test_a_history_that_grows_over_several_steps_is_measured():
    torch.manual_seed(0)
    module = Quasi()
    weights = module.state_dict()

    def same():
        other = Quasi()
        other.load_state_dict(weights)
        return other

    assert figure(measure_step(module, batch())) == pytest.approx(true_peak(same, batch, 12), rel=0.01)


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: torch.rand(()),  # as Hugging Face's speech models leave layers out
        pytest.param(lambda: torch.rand(1).item(), marks=pytest.mark.nightly),
    ],
)
def test_a_step_that_draws_says_so(draw):
    class Draws(Deep):
        def runs(self, number):
            return draw() >= 0.1

    before = random.getstate()
    profile = profiled(Draws())
    assert profile.assumptions == ()
    assert "draws random numbers" in " ".join(estimate_step(profile).cautions)
    assert random.getstate() == before


def test_a_plain_step_takes_two_batches_and_has_no_cautions():
    profile = profiled(Classifier())
    assert (profile.traced_batches, profile.growth, profile.cautions) == (2, None, ())


@pytest.mark.nightly
def test_memory_that_grows_is_named_and_predicted_for_an_epoch(tmp_path):
    module = KeepsOutputs()
    module.trainer = quiet_trainer(max_epochs=1, limit_train_batches=100)
    profile = profile_module(module, batch(), emulation=Emulation("cpu"))
    assert profile.growth.batches == 100
    assert figure(profile) == pytest.approx(true_peak(KeepsOutputs, batch, 100), rel=1e-3)
    assert estimate_step(profile).growth_bytes_per_batch == profile.growth.bytes_per_batch > 0
    assert "Memory grows by" in estimate_step(profile).to_dict()["cautions"][0]
    assert "grows" in profile.only_this_size
    write_file(tmp_path / "profile.npz", profile.write)
    assert ModelProfile.load(tmp_path / "profile.npz").growth == profile.growth


def test_growth_is_named_where_the_epoch_is_unknown():
    profile = profiled(KeepsOutputs())
    assert profile.growth.batches == profile.traced_batches
    assert profile.after(profile.traced_batches) is profile
    assert figure(profile.after(500)) - figure(profile.after(400)) == 100 * profile.growth.bytes_per_batch


def test_growth_that_is_small_is_seen_if_it_goes_on():
    for profile in (profiled(KeepsLosses()), measure_step(KeepsLosses(), batch())):
        assert (profile.growth.bytes_per_batch, profile.traced_batches) == (4, 3)
        assert figure(profile.after(1003)) - figure(profile) == 4000
        assert "Memory grows by 4 B per batch" in profile.cautions[0]


def test_small_growth_takes_whole_blocks_of_the_allocator():
    profile = profile_module(KeepsLosses(), batch(), any_micro_batch=False)
    assert figure(profile.after(1003)) - figure(profile) == 1000 * 512


def test_small_growth_that_stops_is_none():
    profile = profiled(KeepsAFewLosses())
    assert (profile.traced_batches, profile.growth, profile.cautions) == (3, None, ())


@pytest.mark.nightly_cases("Swallows")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (NeverSteps, "20 batches.*AdamW 0"),
        (Swallows, "it was ended after 3 s at .*(test_course|modules).py"),
    ],
)
def test_what_does_not_end_is_refused(module, reason):
    limits = TraceLimits(seconds=3, batches=20)
    with pytest.raises(TraceError, match=f"was not known: {reason}"):
        profiled(module(), limits=limits)
    with pytest.raises(TraceError, match=f"was not known: {reason}"):
        measure_step(module(), batch(), limits=limits)


def test_an_optimizer_that_never_steps_is_named():
    with pytest.raises(TraceError, match=r"40 batches \(steps: Adam 1, Adam 40\)"):
        profiled(OneIsIdle(), limits=TraceLimits(batches=40))


def test_a_module_without_optimizers_of_lightnings_is_known_after_a_few_batches():
    profile = profiled(StepsInItsBackward())
    assert profile.traced_batches <= 4
    assert figure(profile) == pytest.approx(true_peak(StepsInItsBackward, batch, 3), rel=1e-3)
