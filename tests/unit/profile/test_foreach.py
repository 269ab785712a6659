import pytest
import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from lightning_memfit.memory import Category
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.events import CATEGORIES
from lightning_memfit.profile.patches import foreach_defaults
from lightning_memfit.profile.trace import Emulation

WEIGHTS = 4 * (64 * 64 * 4)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))

    def forward(self, x):
        return type("Output", (), {"loss": self.layers(x).square().mean()})


def scratch_in_step(device, foreach=None):
    def make_optimizer(module):
        return torch.optim.AdamW(module.parameters(), foreach=foreach)

    events = profile_module(
        Model(), {"x": torch.zeros(2, 64)}, emulation=Emulation(device), make_optimizer=make_optimizer
    ).events
    start = next(at for at, name in reversed(events.phases) if name == "step")
    temporary = CATEGORIES.index(Category.TEMPORARY)
    signed = (torch.tensor(events.events).sign() * torch.tensor(events.sizes[events.storages])).numpy()
    signed[events.categories[events.storages] != temporary] = 0
    live = signed.cumsum()
    return int(live[start:].max() - live[start])


@pytest.mark.parametrize("foreach", [None, True])
def test_adamw_on_cuda_needs_scratch_memory_of_all_weights(foreach):
    assert scratch_in_step("cuda", foreach) > 0.9 * WEIGHTS


def test_foreach_off_and_cpu_step_one_parameter_at_a_time():
    assert scratch_in_step("cuda", False) < 0.6 * WEIGHTS
    assert scratch_in_step("cpu") < 0.6 * WEIGHTS


def test_upstream_is_left_as_it_was():
    tables = optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types
    before = [list(table) for table in tables], optimizer._get_foreach_kernels_supported_devices
    with foreach_defaults(cuda=True):
        assert "cpu" in optimizer._get_foreach_kernels_supported_devices()
    assert ([list(table) for table in tables], optimizer._get_foreach_kernels_supported_devices) == before
