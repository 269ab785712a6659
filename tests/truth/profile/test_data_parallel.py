"""DDP on one device takes its buckets, too."""

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import Emulation
from tests.helpers.trainers import quiet_trainer

from .modules import WIDTH, Classifier, batch, peak, true_peak


class Wide(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_ddp_on_one_device_has_its_buckets(options):
    module = Wide()
    module.trainer = quiet_trainer(strategy=DDPStrategy(process_group_backend="gloo", **options), max_epochs=1)
    traced = profile_module(module, batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    measured = measure_step(module, batch())
    try:
        strategy = DDPStrategy(process_group_backend="gloo", **options)
        truth = true_peak(Wide, batch, 5, strategy=strategy)
        for _ in range(2):  # a thread of gloo that is late frees a copy unseen
            truth = min(truth, true_peak(Wide, batch, 5, strategy=DDPStrategy(process_group_backend="gloo", **options)))
        beside = profile_module(module, batch(), emulation=Emulation("cpu"), any_micro_batch=False)
    finally:
        torch.distributed.destroy_process_group()
    assert peak(traced.events) == pytest.approx(truth, rel=2e-3)
    assert not traced.remarks
    assert "buckets of DDP" in " ".join(measured.cautions)
    assert peak(beside.events) == peak(traced.events)
