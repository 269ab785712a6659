"""`SameNoise`: draws of random numbers that give samples the same noise, together and apart.

Noise depends on the size of a batch: dropout of four samples draws other numbers than dropout of two and two. While a
batch is compared with its parts, dropout does nothing, and what is drawn depends on its last dimension alone, so that
every sample gets the same in every pass. Permutations shift by one, and chosen indices are all the same, so that mixing
of samples shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

aten = torch.ops.aten

_WIDTHS = {torch.float64: 64, torch.complex128: 64, torch.float32: 32, torch.complex64: 32}
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
"""Kernels whose fifth argument, `ignore_index`, says which labels `cross_entropy` and `nll_loss` leave out."""
_FUSED = ("dropout_p", "dropout")
"""Names of the arguments with which kernels draw inside themselves: attention, recurrent layers."""
_UNIFORM = {"rand", "rand_like", "uniform_", "uniform"}
_NORMAL = {"randn", "randn_like", "normal_", "normal", "normal_functional", "log_normal_", "cauchy_"}
_INTEGERS = {"randint", "randint_like", "random_", "random"}
_CHANCES = {"bernoulli", "bernoulli_"}


class SameNoise(TorchDispatchMode):
    """Runs a step with the same noise for every sample, and notes what a comparison has to know of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least_bits = 64  # of the least exact floating-point numbers that were computed
        self.ignored: set[int] = set()  # entries of labels that losses were told to leave out
        self.num_draws = 0
        self.repeats = False  # whether parts have drawn the same numbers from a generator of the step's own
        self._drawn_from: list[set[bytes]] = []

    def begin_part(self) -> None:
        """Begin another part of the batch."""
        self._drawn_from.append(set())

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _drops_inside(func):
            args, kwargs = _without_dropout(func, args, kwargs)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.num_draws += 1
            if (own := kwargs.get("generator")) is not None:
                state = own.get_state().numpy().tobytes()
                self.repeats |= any(state in others for others in self._drawn_from[:-1])
                self._drawn_from[-1].add(state)
            return _drawn(func, args, kwargs)
        elif func in _LOSSES:
            self.ignored.add(int(kwargs.get("ignore_index", args[4])))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor) and found.is_floating_point():
            self.least_bits = min(self.least_bits, _WIDTHS.get(found.dtype, 16))
        return found


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what takes the place of a draw. Generators go on as they would."""
    name = func.overloadpacket.__name__
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    found = func(*args, **kwargs)
    if not isinstance(found, Tensor) or not found.numel():
        return found
    if name == "randperm":
        return torch.arange(len(found), device=found.device).roll(1).to(found.dtype)
    if name == "multinomial":  # the likeliest ones
        likeliest = args[0].sort(dim=-1, descending=True, stable=True).indices[..., : found.shape[-1]]
        return found.copy_(likeliest if likeliest.shape == found.shape else likeliest[..., :1].expand_as(found))
    value = _values(name, found, args, kwargs)
    return found if value is None else found.copy_(value)


def _values(name: str, found: Tensor, args: Any, kwargs: Any) -> Any:
    """Return the values of a draw, which its last dimension alone decides; None for an unknown kind."""
    width = (found.shape[-1],) if found.ndim > 1 else (1,) if found.ndim else ()
    index = torch.arange(found.shape[-1] if found.ndim > 1 else 1, device=found.device, dtype=torch.float32).view(width)
    wave = (index * 2.4 + 0.7).sin()  # between -1 and 1, and unlike its neighbours
    if name in _UNIFORM:
        low, high = (args[1], args[2]) if name == "uniform_" and len(args) > 2 else (0.0, 1.0)
        return low + (high - low) * (0.5 + 0.49 * wave)
    if name in _NORMAL:
        if name == "normal" and isinstance(args[0], Tensor):
            return args[0] + (args[1] if len(args) > 1 else 1.0) * wave
        mean, deviation = (args[1], args[2]) if name == "normal_" and len(args) > 2 else (0.0, 1.0)
        return mean + deviation * wave
    if name in _INTEGERS:
        numbers = [one for one in args if isinstance(one, int)]
        low, high = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0] if numbers else 2)
        return torch.full((), (low + high - 1) // 2, device=found.device)
    if name in _CHANCES:
        given = args[1] if len(args) > 1 else kwargs.get("p")
        chance = given if isinstance(given, (float, Tensor)) else 0.5 if name == "bernoulli_" else args[0]
        if isinstance(chance, float) and chance >= 0.5:  # of dropout: everything is kept
            return torch.ones((), device=found.device)
        return (chance > 0.5 + 0.49 * wave).to(found.dtype)
    if name == "exponential_":  # as `gumbel_softmax` draws
        return torch.ones((), device=found.device)
    return None


@contextmanager
def without_recurrent_dropout(module: nn.Module) -> Iterator[None]:
    """Switch off the dropout between layers of LSTMs and GRUs, which cuDNN draws inside its kernels."""
    layers = [(child, child.dropout) for child in module.modules() if isinstance(child, nn.RNNBase) and child.dropout]
    for child, _ in layers:
        child.dropout = 0.0
    try:
        yield
    finally:
        for child, dropout in layers:
            child.dropout = dropout


@cache
def _drops_inside(func: Any) -> bool:
    """Whether a kernel drops by itself, or is the backward of one, which makes the mask again from the seed.

    Backward kernels draw nothing and aren't tagged as random, but autograd gives them the module's probability.
    """
    return any(argument.name in _FUSED and str(argument.type) == "float" for argument in func._schema.arguments)


def _without_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with which a fused kernel draws nothing."""
    names = [argument.name for argument in func._schema.arguments]
    args = tuple(0.0 if names[index] in _FUSED else arg for index, arg in enumerate(args))
    return args, {name: 0.0 if name in _FUSED else value for name, value in kwargs.items()}
