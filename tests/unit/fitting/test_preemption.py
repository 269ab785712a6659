"""What tells a preempted run whether it may end in a validation: samples of its weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_memfit import Preemption
from lightning_memfit.fitting.recovery.preemption import _samples


class Quantized(TwoTensor):
    """A weight that has no operation of its own, as quantized ones have few."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(func)
        return cls(args[0].a, args[0].b)


def with_weight(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def are_trained(module: nn.Module, before: list[Tensor]) -> bool:
    preemption = Preemption()
    preemption._trained = before
    return preemption._are_trained(module)


@pytest.mark.parametrize(
    "module",
    [with_weight(Quantized(torch.ones(4), torch.ones(4))), nn.LazyLinear(3), nn.ReLU()],
    ids=["wrapper", "lazy", "none"],
)
def test_weights_without_plain_values_count_as_trained(module: nn.Module) -> None:
    assert are_trained(module, _samples(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_any_kind_of_number_are_told_apart(dtype: torch.dtype) -> None:
    module = with_weight(torch.ones(1000).to(dtype))
    before = _samples(module)
    assert are_trained(module, before)
    module.weight.zero_()
    assert not are_trained(module, before)


def test_samples_keep_no_copy_of_a_weight() -> None:
    module = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        samples = _samples(module)
        assert sum(one.untyped_storage().nbytes() for one in samples) < 8192
        assert are_trained(module, samples)
        module.weight.mul_(2)
        assert not are_trained(module, samples)
