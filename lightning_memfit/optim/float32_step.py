"""`Float32Step`: let any optimizer step bfloat16 weights in float32, a bounded number of elements at a time.

Written for torch 2.11-2.13 (`__setstate__`, attributes that end in `_hooks`) and bitsandbytes 0.50 (`init_state`);
`tests/numerics/optim/test_float32_step.py` fails when these move.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.optim.gradient_release import refuse_coupled
from lightning_memfit.optim.paging import mark_like
from lightning_memfit.optim.rounding import Copies, generator_for, padded, round_stochastically_
from lightning_memfit.optim.states import BLOCK_SIZE, FROM_WEIGHTS, lay_out, refuse_shapes
from lightning_memfit.optim.steps import initialize, narrowed, refuse_sparse, run_closure, step_below_hooks

FLOAT32_STEP = "float32_step"
"""Key of a state dict under which the position of the random bits is saved."""
_PER_BLOCK = "absmax"
_ELEMENTWISE = {
    "torch.optim": ("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    "bitsandbytes.optim": ("Adam", "AdamW", "Lion", "RMSprop", "SGD"),
}


def can_be_cut(optimizer: Optimizer, parameter: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether an update of an element depends only on that element's gradient and state, and parts can be views."""
    cls = type(optimizer)
    stem = cls.__name__.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    whole = [parameter, *(value for value in state.values() if isinstance(value, Tensor))]
    return all(tensor.is_contiguous() for tensor in whole) and any(
        cls.__module__.startswith(f"{library}.") and stem in names for library, names in _ELEMENTWISE.items()
    )


def pieces_of(parameter: Tensor, group: int, state: dict[str, Any], limit: int) -> "Iterator[Piece]":
    """Cut a weight into pieces of about equal length, at most `limit` rounded up to a multiple of 256 elements."""
    total = parameter.numel()
    if total <= limit:
        yield Piece(parameter, group, state, None)
        return
    before = dict(state)
    length = -(-total // -(-total // limit))
    length = -(-length // BLOCK_SIZE) * BLOCK_SIZE
    for start in range(0, total, length):
        yield Piece(parameter, group, before, slice(start, min(start + length, total)))


class Piece:
    """A weight, its gradient and its optimizer state before the step, or (views of) the parts that `span` cuts out."""

    def __init__(self, parameter: Tensor, group: int, before: dict[str, Any], span: slice | None) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.parameter = parameter
        self.group = group
        self.span = span
        if span is None:
            self.weight, self.gradient, self.state = parameter, gradient, before
        else:
            self.weight, self.gradient = parameter.detach().view(-1)[span], gradient.reshape(-1)[span]
            self._views = {key: self._part(key, value, span) for key, value in before.items()}
            self.state = dict(self._views)

    def keep(self, whole: MutableMapping[str, Any]) -> None:
        """Write the part's state after the step into the weight's own state."""
        for key, value in self.state.items():
            if not self._is_part(key, value):
                whole[key] = value
            elif value is not self._views.get(key):
                if key not in whole:
                    whole[key] = torch.empty_like(self.parameter, dtype=value.dtype, requires_grad=False)
                whole[key].view(-1)[self.span].copy_(value)

    def _part(self, key: str, value: Any, span: slice) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == self.parameter.shape:
            return mark_like(value.view(-1)[span], value)
        if key.startswith(_PER_BLOCK):
            return mark_like(value[span.start // BLOCK_SIZE : -(-span.stop // BLOCK_SIZE)], value)
        return value.clone() if value.dim() == 0 else value

    def _is_part(self, key: str, value: Any) -> bool:
        return isinstance(value, Tensor) and (value.shape == self.weight.shape or key.startswith(_PER_BLOCK))


def default_chunk(num_elements: int) -> int:
    """Elements that have float32 copies at a time by default, of so many bfloat16 weights.

    Copies then take about one byte for each weight of the model. Fewer than 2**20 elements leave kernels too little
    work, more than 2**24 save no time.
    """
    return min(1 << 24, max(1 << 20, num_elements // 16))


def _of_wrapped(name: str) -> property:
    """An attribute that is the wrapped optimizer's own; a property, as classes are asked for it too."""
    return property(lambda self: getattr(self.wrapped, name), lambda self, value: setattr(self.wrapped, name, value))


class Float32Step(Optimizer):
    """Wraps an optimizer and steps its bfloat16 weights through float32 copies, a chunk at a time.

    The optimizer steps float32 copies of some weights and gradients at a time, and the result is rounded at random into
    the weights. That needs 9 bytes for each of `chunk_elements`, or 8 plus the optimizer's own scratch memory if that
    is more (none for fused kernels and, on CUDA, for bitsandbytes; 8 bytes for batched kernels). States are float32, or
    8 bits wide, as they would be for float32 weights.

    Elementwise optimizers (`can_be_cut`) step parts of a weight; others step each weight as a whole, so that the
    largest weight counts if it exceeds `chunk_elements`. Weights of other dtypes are stepped directly. Groups, states,
    defaults and hooks are the wrapped optimizer's own.

    Args:
        optimizer: Must step each parameter independently of the others and not have stepped yet.
        chunk_elements: Most elements that have float32 copies at a time; None follows the model (`default_chunk`).
        seed: Seed of the random bits, the same on all ranks, as replicas would drift apart otherwise. The global random
            state is neither used nor changed.

    Raises:
        ValueError: If the optimizer cannot step the copies.
    """

    def __init__(self, optimizer: Optimizer, chunk_elements: int | None = None, seed: int = 0) -> None:
        refuse_coupled(optimizer, "stepping bfloat16 weights in float32, a chunk at a time,")
        if optimizer.state:
            raise ValueError(
                f"`optimizer` ({type(optimizer).__name__}) has states already, of the weights' dtype. Wrap it before "
                "it steps or is loaded; one that makes them when it is constructed, as Adagrad does, can't be wrapped."
            )
        weights = [p for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.bfloat16]
        self.wrapped = optimizer
        self.chunk_elements = chunk_elements or default_chunk(sum(weight.numel() for weight in weights))
        self.seed = seed
        self.num_steps = 0
        # bitsandbytes would exchange the memory of others for contiguous ones.
        is_bitsandbytes = hasattr(optimizer, "init_state")
        self._memory_format = torch.contiguous_format if is_bitsandbytes else torch.preserve_format
        for name, hooks in vars(optimizer).items():
            if name.endswith("_hooks"):
                setattr(self, name, hooks)
        self.__setstate__({})  # instead of the constructor, which would make groups

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":
            raise AttributeError(name)  # not constructed yet
        return getattr(self.wrapped, name)

    param_groups = _of_wrapped("param_groups")
    state = _of_wrapped("state")
    defaults = _of_wrapped("defaults")

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every weight that has a gradient once."""
        loss = run_closure(closure)
        for group in self.param_groups:
            refuse_sparse("Float32Step", (p for p in group["params"] if p.dtype is torch.bfloat16))
        initialize(self)
        with torch.no_grad():
            generators: dict[torch.device, torch.Generator] = {}
            for chunk in self._chunks():
                device = chunk[0].parameter.device
                if device not in generators:
                    generators[device] = generator_for(device, self.seed, self.num_steps)
                self._step_stand_ins(chunk, generators[device])
            self._step_others()
        self.num_steps += 1
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the states of the wrapped optimizer and the position of the random bits."""
        return {**self.wrapped.state_dict(), FLOAT32_STEP: {"seed": self.seed, "num_steps": self.num_steps}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: If the states were written without this class or for other weights.
        """
        own = state_dict.get(FLOAT32_STEP)
        if own is None:
            raise ValueError(
                "`ckpt_path`: its optimizer states were written without StochasticRounding. Resume without it, or "
                f"{FROM_WEIGHTS}."
            )
        refuse_shapes(self, state_dict)
        loaded = [{key: value for key, value in state_dict.items() if key != FLOAT32_STEP}]
        # Last of the hooks, so that it sees what the others have made of the states.
        handle = self.wrapped.register_load_state_dict_pre_hook(lambda _, adapted: loaded.append(adapted))
        try:
            self.wrapped.load_state_dict(loaded[0])
        finally:
            handle.remove()
        self._undo_casts(loaded[-1])
        self.seed, self.num_steps = own["seed"], own["num_steps"]

    def _undo_casts(self, state_dict: dict[str, Any]) -> None:
        """Restore the dtypes of loaded states, which torch casts to the dtype of the weight."""
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, saved in state_dict["state"].get(number, {}).items():
                found = self.state[parameter].get(key)
                if isinstance(saved, Tensor) and isinstance(found, Tensor) and saved.dtype is not found.dtype:
                    self.state[parameter][key] = saved.detach().to(found.device, copy=True)

    def _chunks(self) -> Iterator[list[Piece]]:
        """Yield chunks of pieces of the bfloat16 weights: as many as fit, all on one device."""
        chunk: list[Piece] = []
        filled, device = 0, None
        for index, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is None or parameter.dtype is not torch.bfloat16:
                    continue
                state = self.state[parameter]
                if not state and hasattr(self.wrapped, "init_state"):
                    # bitsandbytes chooses the width of states by the weight itself, and could not by a float32 copy.
                    self.wrapped.init_state(group, parameter, index, place)
                lay_out(parameter, state)
                limit = parameter.numel()
                if limit > self.chunk_elements and can_be_cut(self.wrapped, parameter, state):
                    limit = self.chunk_elements
                for piece in pieces_of(parameter, index, state, limit):
                    size = padded(piece.weight.numel())
                    if chunk and (parameter.device != device or filled + size > self.chunk_elements):
                        yield chunk
                        chunk, filled = [], 0
                    chunk.append(piece)
                    filled, device = filled + size, parameter.device
        if chunk:
            yield chunk

    def _step_stand_ins(self, chunk: list[Piece], generator: torch.Generator) -> None:
        weights = [piece.weight for piece in chunk]
        values = Copies(weights, self._memory_format)
        self._load(values, weights)
        gradients = values.beside()
        torch._foreach_copy_(gradients.parts, [piece.gradient for piece in chunk])
        members: dict[int, list[Tensor]] = defaultdict(list)
        for piece, stand_in, gradient in zip(chunk, values.parts, gradients.parts, strict=True):
            stand_in.grad = gradient
            members[piece.group].append(stand_in)
        groups = [{**self.param_groups[index], "params": params} for index, params in members.items()]
        states = dict(zip(values.parts, (piece.state for piece in chunk), strict=True))
        with narrowed(self.wrapped, groups, states):
            step_below_hooks(self.wrapped)  # hooks belong to the step as a whole
        for stand_in in values.parts:
            stand_in.grad = None
        self._store(values, weights, gradients, generator)
        for piece in chunk:
            if piece.span is not None:
                piece.keep(self.state[piece.parameter])

    def _load(self, values: Copies, weights: list[Tensor]) -> None:
        torch._foreach_copy_(values.parts, weights)

    def _store(self, values: Copies, weights: list[Tensor], scratch: Copies, generator: torch.Generator) -> None:
        """Round the values into the weights; `values` and `scratch` are overwritten."""
        round_stochastically_(values.flat, generator, scratch.flat)
        torch._foreach_copy_(weights, values.parts)

    def _step_others(self) -> None:
        groups = []
        for group in self.param_groups:
            others = [p for p in group["params"] if p.dtype is not torch.bfloat16 and p.grad is not None]
            for parameter in others:
                lay_out(parameter, self.state.get(parameter, {}))
            if others:
                groups.append({**group, "params": others})
        if groups:
            with narrowed(self.wrapped, groups):
                step_below_hooks(self.wrapped)
