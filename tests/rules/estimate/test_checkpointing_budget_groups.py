"""Budgets for modules whose blocks are of several kinds and sizes, or don't run one after the other."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memfit.estimate.block_figures import BudgetError
from lightning_memfit.estimate.checkpointing_budget import cpu_rate
from lightning_memfit.profile.build import measure_step
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.checkpointing_budget import make_planner
from tests.contract.checkpointing.models import t5
from tests.helpers.modules import LanguageModel


class Output:
    def __init__(self, loss):
        self.loss = loss


class Twice(nn.Module):
    """Two convolutions with norms, as in a U-Net."""

    def __init__(self, width, out):
        super().__init__()
        layers = [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        self.net = nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())

    def forward(self, x):
        return self.net(x)


class UNet(nn.Module):
    """Every block has another size; those of the way down feed those of the way up."""

    def __init__(self):
        super().__init__()
        widths = [4, 8, 16, 32]
        self.downs = nn.ModuleList(Twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.ups = nn.ModuleList(Twice(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, pixel_values, labels):
        x, skips = pixel_values, []
        for down in self.downs:
            x = down(nn.functional.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for up, skip in zip(self.ups, skips[-2::-1], strict=True):
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1))
        return Output((self.head(x).mean((1, 2, 3)) - labels).square().mean())


class Towers(nn.Module):
    """One encoder for two inputs, so that no block runs once."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def encode(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, one, other):
        return Output((self.encode(one) - self.encode(other)).square().mean())


def swin():
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
    return SwinForImageClassification(SwinConfig(**sizes, window_size=4, num_labels=2))


def images():
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.zeros(4, dtype=torch.long)}


def tokens():
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


CASES = {
    "unet": (UNet, images, 7),
    "towers": (Towers, lambda: {"one": torch.randn(64, 8), "other": torch.randn(64, 8)}, 1),
    "t5": (t5, tokens, 5),
    "swin": (swin, images, 4),
}


def planner_of(module, batch, **arguments):
    rate, options = cpu_rate(torch.float32), StepOptions()
    return make_planner(
        module, batch, options, Emulation("cpu"), rate, ActivationCheckpointing, rounding_bytes=1, **arguments
    )


def peak_of(profile):
    _, second, *_ = (at for at, phase in profile.events.phases if phase == "forward")  # the first batch is checked
    return int(profile.events.live_bytes()[second:].max())


@pytest.mark.nightly
@pytest.mark.nightly_cases("swin", "t5", "unet")
@pytest.mark.parametrize("name", CASES)
def test_executed_peaks_are_within_ten_budgets(name):
    build, batch, num_links = CASES[name]
    torch.manual_seed(0)
    module, batch = LanguageModel(build().train()), batch()
    planner = planner_of(module, batch)
    assert len(planner._chain) == num_links
    assert planner.minimum_bytes < planner.plain_peak_bytes
    measured = {}
    for budget in np.linspace(planner.minimum_bytes, planner.plain_peak_bytes, 10).astype(int).tolist():
        plan, _ = planner.plan(budget)
        if plan.choices not in measured:
            callback = ActivationCheckpointing(choices=plan.choices)
            measured[plan.choices] = peak_of(measure_step(module, batch, callbacks=(callback,)))
        assert measured[plan.choices] <= plan.peak_bytes <= budget
    with pytest.raises(BudgetError, match="least that any plan needs"):
        planner.plan(planner.minimum_bytes - 1)


@pytest.mark.nightly
def test_a_budget_for_blocks_that_are_named():
    module = LanguageModel(UNet().train())
    planner = planner_of(module, images(), blocks=["model.downs"])
    plan, _ = planner.plan(planner.minimum_bytes)
    assert len(plan.choices) == 4
    assert set(plan.choices) != {"none"}
