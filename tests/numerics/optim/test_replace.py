import warnings

import pytest
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from torch import nn
from torch.optim import lr_scheduler

from lightning_memfit.optim.eight_bit import to_bitsandbytes
from lightning_memfit.optim.exchange import exchange
from lightning_memfit.optim.float32_step import Float32Step
from lightning_memfit.optim.replace import replace_optimizers


def adamw(lr=0.1):
    return torch.optim.AdamW([nn.Parameter(torch.randn(4))], lr=lr)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: (step + 1) / 10),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 5),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
    "Chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=12),
    "Cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "Restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


def trajectory(optimizer, scheduler, num_steps=8):
    seen = []
    for _ in range(num_steps):
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group.get("betas", (group.get("momentum"),))[0]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedule_goes_on_as_before(name, optimizer):
    def make():
        parameters = [nn.Parameter(torch.randn(4))]
        if optimizer == "SGD":
            made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        else:
            made = torch.optim.AdamW(parameters, lr=0.1)
        return made, SCHEDULERS[name](made)

    expected = trajectory(*make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler does not see its optimizer step
        converted, scheduler = replace_optimizers(make(), to_bitsandbytes)
        actual = trajectory(converted, scheduler)
    assert actual == expected
    assert len(set(expected)) > 1


def test_plateau():
    optimizer = adamw()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    configured = {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}
    converted = replace_optimizers(configured, to_bitsandbytes)["optimizer"]
    for _ in range(3):
        scheduler.step(1.0)
    assert converted.param_groups[0]["lr"] == pytest.approx(0.001)


def forms():
    a, b = adamw(), adamw()
    scheduler = SCHEDULERS["Cosine"]
    return {
        "none": None,
        "optimizer": a,
        "list": [a, b],
        "tuple": (a, b),
        "two lists": ([a, b], [scheduler(a), {"scheduler": scheduler(b), "interval": "step"}]),
        "dict": {"optimizer": a, "lr_scheduler": scheduler(a), "monitor": "loss"},
        "nested dict": {"optimizer": a, "lr_scheduler": {"scheduler": scheduler(a), "interval": "step"}},
        "dicts": ({"optimizer": a, "lr_scheduler": scheduler(a)}, {"optimizer": b}),
    }


@pytest.mark.parametrize("form", forms())
def test_every_form_lightning_accepts(form):
    configured = forms()[form]
    replaced = replace_optimizers(configured, to_bitsandbytes)
    if form != "optimizer":
        assert type(replaced) is type(configured)
    if configured is None:
        return
    before, _, _ = _configure_optimizers(configured)
    after, schedulers, monitor = _configure_optimizers(replaced)
    assert [
        o.param_groups[0]["params"][0] is n.param_groups[0]["params"][0] for o, n in zip(before, after, strict=True)
    ]
    assert {type(o).__name__ for o in after} == {"AdamW8bit"}
    for scheduler in schedulers:
        scheduler = scheduler["scheduler"] if isinstance(scheduler, dict) else scheduler
        assert any(scheduler.optimizer is optimizer for optimizer in after)
    assert monitor == ("loss" if form == "dict" else None)


CONVERSIONS = {
    "8-bit": to_bitsandbytes,
    "another family": lambda old: exchange(old, "bitsandbytes.Lion", {"betas": (0.9, 0.99)}),
    "torch's own": lambda old: exchange(old, "torch.AdamW", {"fused": True}),
    "wrapped": lambda old: Float32Step(old, 4096),
    "twice": lambda old: to_bitsandbytes(CONVERSIONS["another family"](old)),
}


def test_a_step_put_on_the_object_is_refused():
    optimizer = adamw()
    optimizer.step = lambda closure=None: None
    with pytest.raises(ValueError, match="register_step_pre_hook"):
        replace_optimizers(optimizer, to_bitsandbytes)
    assert type(optimizer) is torch.optim.AdamW


# --- parameters taken out -------------------------------------------------------------------------------------------
