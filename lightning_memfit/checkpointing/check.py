"""Whether recomputing a block gives the gradients of the plain run, measured on the batch that training runs.

The block runs plainly once when it is first called, and as it is checkpointed once more when backward reaches it, from
the same inputs and state and with the same gradient of its outputs. Gradients are compared by a few random projections
of each, so that nothing but these is kept in between, and no more than one block's activations and gradients are alive
beside those of the step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

_NUM_PROJECTIONS = 4
_LENGTH = 1 << 13
"""Elements that are projected at a time."""

_EQUAL = 1e-12
"""Largest relative difference of projections of equal tensors: float64 sums of memory that is aligned otherwise."""

_NUM_REPEATS = 3
_MOST_NOISE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest relative difference between two equal runs that counts as rounding; of half precision `_HALF_NOISE`."""

_HALF_NOISE = 5e-2


class InexactRecomputationError(RuntimeError):
    """Recomputing a block would not give what its first run gave; the message says why, and the way out."""

    def __init__(self, block: str, found: str) -> None:
        super().__init__(
            f"Activation checkpointing of {block} would not be exact: {found} Leave the block as it is: name the "
            "others in `blocks`, or give it 'none' or 'offload' in `choices`."
        )


# --- what is compared -------------------------------------------------------------------------------------------------


class Reading:
    """Projections of what one run of a block returned, and of the gradients that it gave.

    Args:
        names: What each tensor is called.
        tensors: The tensors; None for a gradient that there is none of.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
        self.names = list(names)
        self.values = [None if tensor is None else _projected(tensor) for tensor in tensors]

    @staticmethod
    def of_outputs(result: Any) -> "Reading":
        """What a run returned, in any structure."""
        outputs = _tensors_in(result)
        return Reading([f"output {number + 1}" for number in range(len(outputs))], outputs)

    def first(self, num: int) -> "Reading":
        """The first of what was read."""
        part = Reading([], [])
        part.names, part.values = [f"output {number + 1}" for number in range(num)], self.values[:num]
        return part

    def difference(self, other: "Reading") -> tuple[float, str]:
        """Largest relative difference to another reading, and the name of what differs most."""
        worst = (0.0, "")
        for name, one, two in zip(self.names, self.values, other.values, strict=True):
            if one is None or two is None:
                # Without a gradient is the same as with one of zeros.
                only = two if one is None else one
                found = 0.0 if only is None or not bool(only.any()) else math.inf
            else:
                found = _relative(one, two)
            worst = max(worst, (found, name))
        return worst


def _relative(one: Tensor, two: Tensor) -> float:
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return 0.0
    difference = (one - two).norm() / max(float(one.norm()), float(two.norm()), 1e-300)
    return math.inf if not math.isfinite(difference) else float(difference)


def _projected(tensor: Tensor) -> Tensor:
    """Some random projections of a tensor, on the host and in float64."""
    with _disable_current_modes(), torch.no_grad():  # a few hundred KiB that are no memory of the step
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
        pattern = _pattern(tensor.device, dtype)
        total = torch.zeros(_NUM_PROJECTIONS, dtype=dtype, device=tensor.device)
        for number, part in enumerate(tensor.detach().reshape(-1).split(_LENGTH)):
            total += pattern[:, : len(part)] @ part.to(dtype) * (1 + (number * 0.618034) % 1)
        return total.cpu().double()


@lru_cache(maxsize=2)
def _pattern(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    pattern = torch.rand(_NUM_PROJECTIONS, _LENGTH, generator=generator, dtype=torch.float64) * 2 - 1
    return pattern.to(device, dtype)


# --- one run of a block -----------------------------------------------------------------------------------------------


class Inputs:
    """Arguments of a block, apart from the graph that they come from.

    Args:
        args: Positional arguments, in any structure.
        kwargs: Keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = (args, kwargs)
        self._versions = [(tensor, tensor._version) for tensor in _tensors_in(self._given)]

    def are_written(self) -> bool:
        """Whether any tensor among them has been written in place."""
        return any(tensor._version != version for tensor, version in self._versions)

    def needing_grad(self) -> list[Tensor]:
        """Those of the tensors that need gradients, each once."""
        return list({id(tensor): tensor for tensor, _ in self._versions if tensor.requires_grad}.values())

    def apart(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """The arguments in a new graph, and its leaves. As in a plain run, what needs gradients is no leaf itself."""
        new: dict[int, Tensor] = {}
        leaves: list[Tensor] = []

        def renewed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in new:
                new[id(value)] = value.detach()
                if value.requires_grad:
                    leaves.append(new[id(value)].requires_grad_())
                    new[id(value)] = leaves[-1].clone()
            return new[id(value)]

        args, kwargs = tree_map(renewed, self._given)
        return args, kwargs, leaves


class Run:
    """One forward and backward pass of a block by itself.

    Args:
        function: The block.
        inputs: Its arguments.
        parameters: Its parameters by name.
        sides: Called after forward, returns further outputs: tensors that the block leaves in attributes.
        given: The gradient of its only output; by default one that no symmetry of a block makes vanish.

    Attributes:
        reading: The gradients that it gave.
        returned: What it returned.
        has_own_leaves: Whether its outputs depend on nothing that needs gradients but its inputs and parameters.
        constant_outputs: Numbers of the outputs that need no gradients.
        dtype: The coarsest type of what it returned.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        parameters: dict[str, nn.Parameter],
        sides: Callable[[], Sequence[Tensor]] = list,
        given: Tensor | None = None,
    ) -> None:
        with torch.enable_grad():
            args, kwargs, leaves = inputs.apart()
            result = function(*args, **kwargs)
        self.returned = Reading.of_outputs(result)
        outputs = _tensors_in(result)
        self.constant_outputs = tuple(
            number
            for number, leaf in enumerate(tree_flatten(result)[0])
            if isinstance(leaf, Tensor) and not leaf.requires_grad
        )
        differentiable = [output for output in (*outputs, *sides()) if output.requires_grad]
        self.dtype = max((output.dtype for output in outputs if output.is_floating_point()), key=_eps, default=None)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        known = [*leaves, *trained.values()]
        self.has_own_leaves = _leaves_of(differentiable) <= set(map(id, known))
        del result, outputs, args, kwargs
        gradients: Sequence[Tensor | None] = []
        names = [*(f"the gradient of input {number + 1}" for number in range(len(leaves)))]
        names += [f"the gradient of `{name}`" for name in trained]
        if differentiable and known:
            weights = [_pattern_like(output) for output in differentiable] if given is None else [given]
            gradients = torch.autograd.grad(differentiable, known, weights, allow_unused=True)
            del differentiable, weights
        self.reading = Reading(names, gradients) if gradients else Reading([], [])


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _pattern_like(output: Tensor) -> Tensor:
    values = torch.arange(output.numel(), device=output.device, dtype=torch.float32).mul_(0.7).sin_()
    return values.reshape(output.shape).to(output.dtype)


def _leaves_of(outputs: Sequence[Tensor]) -> set[int]:
    """Identities of the leaves that outputs depend on."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    found = {id(output) for output in outputs if output.grad_fn is None}
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return found


# --- random numbers ---------------------------------------------------------------------------------------------------


@contextmanager
def drawing_from(states: dict[torch.device, Tensor]) -> Iterator[None]:
    """In this context torch draws what it drew when its random states were read; afterwards they are as before."""
    now = random_states(states)
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(now)


def random_states(devices: Any) -> dict[torch.device, Tensor]:
    """Read torch's random states of some devices."""
    return {
        device: torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device.type).get_rng_state(device)
        for device in devices
    }


def set_random_states(states: dict[torch.device, Tensor]) -> None:
    """Set torch's random states."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device.type).set_rng_state(state, device)


# --- the verdict ------------------------------------------------------------------------------------------------------


def refuse_unless_equal(
    block: str,
    plain: Reading,
    again: Callable[[], Reading],
    dtype: torch.dtype | None,
    found: str,
    device: torch.device,
) -> None:
    """Compare a run with a repetition, of which more are made where the two differ.

    Args:
        block: What errors call the block.
        plain: The run.
        again: Repeats it.
        dtype: Type of what the block returns.
        found: What a difference means; may name `{what}` and `{error}`.
        device: Where it runs. Off the CPU, differences of one unit of rounding are none.

    Raises:
        InexactRecomputationError: If they differ by more than twice the difference between repetitions, or if these
            differ by more than rounding.
    """
    first = again()
    error, what = plain.difference(first)
    if error <= _EQUAL:
        return
    if math.isfinite(error):
        noise = max(first.difference(again())[0] for _ in range(_NUM_REPEATS))
        floor = 0.0 if device.type == "cpu" or dtype is None else _eps(dtype)
        most = _HALF_NOISE if dtype is None else _MOST_NOISE.get(dtype, _HALF_NOISE)
        if noise <= most and error <= max(2 * noise, floor):
            return
    raise InexactRecomputationError(block, found.format(what=what, error=f"{error:.1e}"))
