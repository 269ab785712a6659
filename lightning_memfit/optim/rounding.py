"""Two ways to round float32 values to bfloat16 weights without losing updates below half a unit in the last place.

Rounding to nearest drops such updates every time, so that training stops making progress once the learning rate is
small.
"""

from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor

State = MutableMapping[str, Any]
COMPENSATION = "compensation"
_DISCARDED_BITS = 16  # float32 has 16 more mantissa bits than bfloat16
_WORD = (1 << 64) - 1


class Rounding(Protocol):
    """How weights are read into float32 and written back."""

    name: str

    def load(self, weight: Tensor, state: State) -> Tensor:
        """Return a new float32 tensor with the weight's value."""

    def store(self, values: Tensor, weight: Tensor, state: State, generator: torch.Generator) -> None:
        """Write float32 values, which may be overwritten, into the bfloat16 weight."""


class Stochastic:
    """Round up or down at random, so that the expectation is the float32 value. Nothing but the weight is stored."""

    name = "stochastic"

    def load(self, weight: Tensor, state: State) -> Tensor:
        """Return the weight in float32."""
        return weight.float()

    def store(self, values: Tensor, weight: Tensor, state: State, generator: torch.Generator) -> None:
        """Round the values and write them."""
        weight.copy_(round_stochastically_(values, generator))


class Kahan:
    """Keep the part that rounding to nearest drops, also in bfloat16: 2 more bytes per weight, 16 bits of precision.

    This is the compensation of Kahan's summation (Zamirai et al., 2020, arXiv 2010.06192).
    """

    name = "kahan"

    def load(self, weight: Tensor, state: State) -> Tensor:
        """Return the sum of the weight and the part dropped last time, in float32.

        Where other code has written to the weight since (clamping, pruning, averaging), that part no longer belongs to
        it: the sum rounds to another weight, and the weight counts alone.
        """
        values = weight.float()
        compensation = state.get(COMPENSATION)
        if compensation is None:
            return values
        # The factor decides ties: the kept part is itself rounded, up to half a unit in last place of the weight.
        belongs = torch.add(weight, compensation, alpha=0.99) == weight
        return values.add_(compensation.where(belongs, 0))

    def store(self, values: Tensor, weight: Tensor, state: State, generator: torch.Generator) -> None:
        """Write the nearest weight, and the part it drops into the state."""
        weight.copy_(values)
        dropped = values.sub_(weight)
        if COMPENSATION in state:
            state[COMPENSATION].copy_(dropped)
        else:
            state[COMPENSATION] = dropped.to(weight.dtype)


def round_stochastically_(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 values, in place, up or down to bfloat16 values whose expectations are the given ones.

    Random bits are added to the 16 that bfloat16 lacks, and these are cut off. It needs 5 bytes of scratch memory per
    element. Infinities and NaN stay; a value beyond bfloat16's largest may become infinite, as in rounding to nearest.

    Args:
        values: Contiguous float32 values.
        generator: Generator on the device of `values`.

    Returns:
        The same tensor, `values`.
    """
    noise = torch.empty_like(values, dtype=torch.int32).random_(0, 1 << _DISCARDED_BITS, generator=generator)
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
