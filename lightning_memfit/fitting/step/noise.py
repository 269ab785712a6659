"""Run samples together and apart with the same random numbers, so that their gradients can be compared.

Noise that a step draws depends on the size of its batch: dropout of four samples draws other numbers than dropout of
two and two. `RecordedNoise` remembers, for each state of a generator, what was drawn from it; `SlicedNoise` makes the
draws of a part at the size of the whole, and gives the part its rows. Generators go through the same states in both,
in the recomputation of checkpointed blocks, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_memfit.memory.kind import index_of

aten = torch.ops.aten

_WIDTHS = {torch.float64: 64, torch.complex128: 64, torch.float32: 32, torch.complex64: 32}
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
"""Kernels whose fifth argument, `ignore_index`, says which labels `cross_entropy` and `nll_loss` leave out."""
_FUSED = ("dropout_p", "dropout")
"""Names of the arguments with which kernels draw inside themselves: attention, recurrent layers."""


@dataclass(frozen=True)
class _Blank:
    """A tensor whose contents don't matter, because the draw fills it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Draw:
    """A draw of the whole batch: enough to make it once more."""

    func: Any
    shape: torch.Size
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self) -> Tensor:
        args = (arg.make() if isinstance(arg, _Blank) else arg for arg in self.args)
        drawn: Tensor = self.func(*args, **self.kwargs)
        return drawn


class RecordedNoise(TorchDispatchMode):
    """Runs a step on some samples together, and remembers every draw of random numbers.

    Permutations are not drawn: all of them reverse the order, so that mixing of samples shows for certain.

    Args:
        size: Number of samples.

    Attributes:
        least_bits: Width of the least exact floating-point numbers that were computed.
        ignored: Entries of labels that losses were told to leave out.
    """

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored: set[int] = set()
        self.draws: dict[bytes, _Draw] = {}
        self.least_bits = 64
        self._size = size

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _drops_inside(func):
            args, kwargs = _without_dropout(func, args, kwargs)
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            if func in _LOSSES:
                self.ignored.add(int(kwargs.get("ignore_index", args[4])))
            found = func(*args, **kwargs)
            if isinstance(found, Tensor) and found.is_floating_point():
                self.least_bits = min(self.least_bits, _WIDTHS.get(found.dtype, 16))
            return found
        if func in (aten.randperm.default, aten.randperm.generator):
            return self._permute(func, args, kwargs).sort(descending=True).values
        if func is aten.native_dropout.default:
            return self._dropout(*args)
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = _generator(args, kwargs).get_state().numpy().tobytes()
        fills = _fills(func)
        remembered = tuple(_remembered(arg, fills and not index) for index, arg in enumerate(args))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            self.draws[state] = _Draw(func, found.shape, remembered, kwargs)
        return found

    def _permute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        drawn: Tensor = self._draw(func, args, kwargs)
        return drawn

    def _dropout(self, value: Tensor, probability: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
        if not train or not probability:
            return value.clone(), torch.ones_like(value, dtype=torch.bool)
        kept = self._draw(aten.bernoulli_.float, (torch.empty_like(value), 1.0 - probability), {})
        scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
        return value * kept * scale, kept.bool()


class SlicedNoise(RecordedNoise):
    """Runs a step on some of the samples with their rows of the noise that was drawn for all of them.

    Args:
        whole: What was drawn for all samples together.
        start: Index of the first sample.
        size: Number of samples.
        total: Number of samples together.

    Attributes:
        is_other: Whether something was drawn for which the whole has nothing, so that results can differ by chance.
    """

    def __init__(self, whole: RecordedNoise, start: int, size: int, total: int) -> None:
        super().__init__(size)
        self._whole = whole
        self._start, self._total = start, total
        self.is_other = False

    @override
    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        drawn = self._whole.draws.get(_generator(args, kwargs).get_state().numpy().tobytes())
        if drawn is None or drawn.func is not func:
            self.is_other = True
            return func(*args, **kwargs)
        in_place = _is_in_place(func)
        rows = self._rows(self._shape(func, args, drawn), drawn.shape)
        if rows is None:
            found = func(*args, **kwargs)
            self.is_other = self.is_other or (isinstance(found, Tensor) and found.shape != drawn.shape)
            return found
        mine = drawn.again()[rows]
        return args[0].copy_(mine) if in_place else mine.clone()

    @override
    def _permute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        drawn = self._whole.draws.get(_generator(args, kwargs).get_state().numpy().tobytes())
        if drawn is None or drawn.func is not func:
            self.is_other = True
            return super()._permute(func, args, kwargs)
        drawn.again()  # generators go on as after the whole
        (number,) = drawn.shape
        # As many as for the whole, or a part of them; anything else depends on the data.
        self.is_other = self.is_other or (args[0] != number and args[0] * self._total != number * self._size)
        return torch.arange(args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device"))

    def _shape(self, func: Any, args: tuple[Any, ...], drawn: _Draw) -> tuple[int, ...]:
        """Return the shape that this part draws."""
        if _fills(func):
            return tuple(args[0].shape)
        sizes = next((arg for arg in args if isinstance(arg, (list, tuple))), None)
        if sizes is not None:
            return tuple(sizes)
        given = next((arg for arg in args if isinstance(arg, Tensor)), None)  # probabilities, one row per sample
        if given is None or not given.ndim or not drawn.shape or given.shape[0] * self._total % self._size:
            return ()
        return (drawn.shape[0] * self._size // self._total, *drawn.shape[1:])

    def _rows(self, shape: tuple[int, ...], whole: torch.Size) -> tuple[slice, ...] | None:
        """Return where this part's rows are in a draw for all; a dimension may hold several entries per sample."""
        different = [dim for dim in range(len(whole)) if len(shape) == len(whole) and shape[dim] != whole[dim]]
        if len(different) != 1:
            return None
        (dim,) = different
        per_sample, rest = divmod(whole[dim], self._total)
        if rest or shape[dim] != per_sample * self._size:
            return None
        first = per_sample * self._start
        return (*[slice(None)] * dim, slice(first, first + shape[dim]))


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


def _generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    own = kwargs.get("generator")
    if own is not None:
        return own  # type: ignore[no-any-return]
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
    device = torch.device(kwargs.get("device") or "cpu") if device is None else device
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(torch.get_device_module(device), "default_generators")  # noqa: B009
    return generators[index_of(device)]  # type: ignore[no-any-return]


def _remembered(value: Any, is_filled: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if is_filled:  # numbers are drawn in the order of memory
        return _Blank(value.shape, value.stride(), value.dtype, value.device)
    return value.detach().clone()


def _is_in_place(func: Any) -> bool:
    return bool(func.overloadpacket.__name__.endswith("_"))


def _is_like(func: Any) -> bool:
    return bool(func.overloadpacket.__name__.endswith("_like"))


def _fills(func: Any) -> bool:
    """Whether a draw takes its shape, and nothing else, from its first argument."""
    return _is_in_place(func) or _is_like(func)


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
