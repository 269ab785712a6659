"""Round float32 values to bfloat16 weights without losing updates below half a unit in the last place.

Rounding to nearest drops such updates every time, so that training stops making progress once the learning rate is
small. Rounded up or down at random, the expectation is the float32 value.
"""

from copy import copy
from itertools import accumulate

import torch
from torch import Tensor

_DISCARDED_BITS = 16  # float32 has 16 more mantissa bits than bfloat16
_WORD = (1 << 64) - 1


class Copies:
    """Float32 tensors in the shapes of some weights, which lie in one `flat` tensor."""

    def __init__(self, weights: list[Tensor], memory_format: torch.memory_format = torch.preserve_format) -> None:
        starts = [0, *accumulate(padded(weight.numel()) for weight in weights)]
        self.flat = torch.empty(starts.pop(), dtype=torch.float32, device=weights[0].device)
        self.parts = [
            self.flat.as_strided(weight.shape, _strides(weight, memory_format), start)
            for weight, start in zip(weights, starts, strict=True)
        ]

    def beside(self) -> "Copies":
        """Tensors of other values, in the same shapes and places of another flat tensor."""
        other = copy(self)
        other.flat = torch.empty_like(self.flat)
        other.parts = [other.flat.as_strided(part.shape, part.stride(), part.storage_offset()) for part in self.parts]
        return other


def padded(num_elements: int) -> int:
    """Elements that a weight takes in `Copies`: the next one begins at a multiple of 256 bytes, as kernels like it."""
    return -(-num_elements // 64) * 64


def _strides(weight: Tensor, memory_format: torch.memory_format) -> tuple[int, ...]:
    if weight.is_contiguous():
        return weight.stride()
    return torch.empty_like(weight, device="meta", memory_format=memory_format).stride()


def round_stochastically_(values: Tensor, generator: torch.Generator, scratch: Tensor) -> Tensor:
    """Round float32 values, in place, up or down to bfloat16 values whose expectations are the given ones.

    Random bits are added to the 16 that bfloat16 lacks, and these are cut off. It needs a byte of memory per element.
    Infinities and NaN stay; a value beyond bfloat16's largest may become infinite, as in rounding to nearest.
    """
    noise = scratch.view(torch.int32).random_(0, 1 << _DISCARDED_BITS, generator=generator)
    noise.masked_fill_(values.isnan(), 0)  # otherwise CUDA's NaN, all ones, would overflow to minus zero
    values.view(torch.int32).add_(noise).bitwise_and_(-1 << _DISCARDED_BITS)
    return values


def generator_for(device: torch.device, seed: int, num_steps: int) -> torch.Generator:
    """Make the generator of one step, so that a step's random bits depend only on the seed and the number of steps.

    SplitMix64 (Steele et al., 2014) mixes the two, since neighbouring seeds don't guarantee unrelated bits.
    """
    mixed = (seed + 0x9E3779B97F4A7C15 * (num_steps + 1)) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return torch.Generator(device).manual_seed((mixed ^ (mixed >> 31)) >> 1)
