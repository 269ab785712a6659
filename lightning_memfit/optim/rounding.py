"""Two ways to round float32 values to bfloat16 weights without losing updates below half a unit in the last place.

Rounding to nearest drops such updates every time, so that training stops making progress once the learning rate is
small.
"""

from copy import copy
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_memfit.optim.states import COMPENSATION, State

_DISCARDED_BITS = 16  # float32 has 16 more mantissa bits than bfloat16
_WORD = (1 << 64) - 1
_SLICES = 8  # of copies, where arithmetic needs memory of its own: less than two bytes per element


class Copies:
    """Float32 tensors in the shapes of some weights, which lie in one `flat` tensor.

    Args:
        weights: The weights, all on one device.
        memory_format: Order of the elements; by default the weights' own.
    """

    def __init__(self, weights: list[Tensor], memory_format: torch.memory_format = torch.preserve_format) -> None:
        starts = [0, *accumulate(padded(weight.numel()) for weight in weights)]
        self.weights = weights
        self.flat = torch.empty(starts.pop(), dtype=torch.float32, device=weights[0].device)
        self.parts = [
            self.flat.as_strided(weight.shape, _strides(weight, memory_format), start)
            for weight, start in zip(weights, starts, strict=True)
        ]

    def beside(self, dtype: torch.dtype = torch.float32) -> "Copies":
        """Tensors of other values, in the same shapes and places of another flat tensor."""
        other = copy(self)
        other.flat = torch.empty_like(self.flat, dtype=dtype)
        other.parts = [other.flat.as_strided(part.shape, part.stride(), part.storage_offset()) for part in self.parts]
        return other

    def free(self) -> None:
        """Let go of the memory."""
        self.flat = self.flat.new_empty(0)
        self.parts.clear()


def padded(num_elements: int) -> int:
    """Elements that a weight takes in `Copies`: the next one begins at a multiple of 256 bytes, as kernels like it."""
    return -(-num_elements // 64) * 64


def _strides(weight: Tensor, memory_format: torch.memory_format) -> tuple[int, ...]:
    if weight.is_contiguous():
        return weight.stride()
    return torch.empty_like(weight, device="meta", memory_format=memory_format).stride()


class Stochastic:
    """Round up or down at random, so that the expectation is the float32 value. Nothing but the weight is stored."""

    name = "stochastic"

    def load(self, values: Copies, states: list[State]) -> None:
        """Write the weights, in float32, into `values`."""
        torch._foreach_copy_(values.parts, values.weights)

    def store(self, values: Copies, states: list[State], scratch: Copies, generator: torch.Generator) -> None:
        """Round the values and write them into the weights; `values` and `scratch` are overwritten."""
        round_stochastically_(values.flat, generator, scratch.flat)
        torch._foreach_copy_(values.weights, values.parts)


class Kahan:
    """Keep the part that rounding to nearest drops, also in bfloat16: 2 more bytes per weight, 16 bits of precision.

    This is the compensation of Kahan's summation (Zamirai et al., 2020, arXiv 2010.06192).
    """

    name = "kahan"

    def load(self, values: Copies, states: list[State]) -> None:
        """Write the sums of the weights and the parts dropped last time into `values`.

        Where other code has written to a weight since (clamping, pruning, averaging), that part no longer belongs to
        it: the sum rounds to another weight, and the weight counts alone.
        """
        torch._foreach_copy_(values.parts, values.weights)
        if not any(COMPENSATION in state for state in states):
            return
        dropped = values.beside(torch.bfloat16)
        dropped.flat.zero_()
        kept = [(part, state) for part, state in zip(dropped.parts, states, strict=True) if COMPENSATION in state]
        torch._foreach_copy_([part for part, _ in kept], [state[COMPENSATION] for _, state in kept])
        size = -(-values.flat.numel() // _SLICES)
        for value, compensation in zip(values.flat.split(size), dropped.flat.split(size), strict=True):
            # The factor decides ties: the kept part is itself rounded, up to half a unit in last place of the weight.
            rounded = torch.add(value, compensation, alpha=0.99).to(torch.bfloat16)
            value.add_(compensation.masked_fill_(rounded != value, 0))

    def store(self, values: Copies, states: list[State], scratch: Copies, generator: torch.Generator) -> None:
        """Write the nearest weights, and the parts they drop into the states; all else is overwritten."""
        torch._foreach_copy_(values.weights, values.parts)
        torch._foreach_copy_(scratch.parts, values.weights)
        values.flat.sub_(scratch.flat)
        scratch.free()  # before there is more in the states
        for weight, state in zip(values.weights, states, strict=True):
            if COMPENSATION not in state:
                state[COMPENSATION] = torch.empty_like(weight, requires_grad=False)
        torch._foreach_copy_([state[COMPENSATION] for state in states], values.parts)


Rounding: TypeAlias = Stochastic | Kahan
"""How weights are read into float32 copies and written back. `states` are those of the weights."""


def round_stochastically_(values: Tensor, generator: torch.Generator, scratch: Tensor) -> Tensor:
    """Round float32 values, in place, up or down to bfloat16 values whose expectations are the given ones.

    Random bits are added to the 16 that bfloat16 lacks, and these are cut off. It needs a byte of memory per element.
    Infinities and NaN stay; a value beyond bfloat16's largest may become infinite, as in rounding to nearest.

    Args:
        values: Contiguous float32 values.
        generator: Generator on the device of `values`.
        scratch: Float32 tensor of the same shape, which is overwritten.

    Returns:
        The same tensor, `values`.
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
