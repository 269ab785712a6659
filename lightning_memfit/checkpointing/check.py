"""The first call of a block: it finds out what the block writes, and checks that recomputing it is exact.

When backward reaches the block, it runs plainly and as it is checkpointed, from the inputs and the state of its call
and with the gradients of its outputs. Outputs must be those of the call, and gradients those of the plain run; they are
compared by projections (`memory.comparison`). So no more than one block's activations and gradients are alive at any
time, as in the recomputation that follows.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map

from lightning_memfit.checkpointing.policies import WatchedWrites, selective_contexts
from lightning_memfit.checkpointing.recompute import (
    SIMPLE,
    Around,
    Function,
    Inside,
    Knowledge,
    LightCall,
    OpaqueResultError,
    in_trace,
)
from lightning_memfit.memory.comparison import EQUAL, Reading, explain_difference, projected, relative_difference
from lightning_memfit.memory.generators import drawing_from, random_states
from lightning_memfit.memory.state import State

_SAME_SHARE = 1e-2
"""Largest relative difference, off the CPU, of two gradients of one tensor that may come from rounding."""


class InexactRecomputationError(RuntimeError):
    """Recomputing a block would not give what its first run gave; the message says why, and the way out."""

    def __init__(self, block: str, found: str) -> None:
        super().__init__(
            f"Activation checkpointing of {block} would not be exact: {found} Leave the block as it is: name the "
            "others in `blocks`, or give it 'none' or 'offload' in `choices`."
        )


class FirstCall:
    """The first call of a block in a training mode. In a trace, whose tensors have no values, nothing is compared."""

    def __init__(self, function: Function, known: Knowledge, kept: frozenset[Any], around: Around) -> None:
        self._function = function
        self._known = known
        self._kept = kept
        self._around = around
        self._may_be_light = around is None and not kept
        self._has_values = not in_trace()
        self._has_run = False
        self._returned: Reading | None = None
        self._given: dict[int, Tensor] = {}
        self._share: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block.

        Raises:
            InexactRecomputationError: If it can't be recomputed; later also from backward.
            ValueError: If it is given a key/value cache.
        """
        known = self._known
        _refuse_caches(known.name, (*args, *kwargs.values()))
        known.is_light = False
        known.look_at_devices(_tensors_in(args))
        children = known.module.modules()
        # Such layers are known to write buffers before a trace has seen it.
        have_statistics = any(one.training and getattr(one, "track_running_stats", False) is True for one in children)
        self._may_be_light &= known.look_at_parameters() and not have_statistics
        num_hooks = self._num_hooks()
        self._state = State(known.groups(), copies_tensors=self._has_values)
        self._inputs = _Inputs(args, kwargs)
        self._random = random_states(known.devices) if self._has_values else {}
        result = self._run_checkpointed(args, kwargs)
        if self._num_hooks() != num_hooks:
            self._refuse("its forward hooks the accumulation of gradients, once more in every recomputation.")
        self._note_written()
        self._look_at_results(result)
        (known.settled if self._has_values else known.traced).add(known.module.training)
        return result

    # --- forward ---

    def _run_checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._known
        if not self._has_values and self._may_be_light and known.takes_light(args, kwargs):
            try:
                return LightCall(self, known).run(args, kwargs)
            except OpaqueResultError:
                self._may_be_light = self._has_run = False
        if not self._kept:
            return known.checkpointed(self, args, kwargs, self._around)
        writes = WatchedWrites()
        forward, recompute = selective_contexts(self._kept, writes)
        contexts = (forward, Inside(self._begin_again, recompute))  # outside of the mode that hands out what was kept
        result = known.checkpointed(self._function, args, kwargs, self._around, context_fn=lambda: contexts)
        if writes.found:
            self._refuse("what a selective choice keeps of it is changed in place afterwards. Or use mode='full'.")
        return result

    def _num_hooks(self) -> int:
        return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in self._known.parameters)

    def _note_written(self) -> None:
        known = self._known
        known.written = tuple(dict.fromkeys((*known.written, *self._state.changed())))
        known.moves_generators |= self._state.have_generators_moved()
        self._may_be_light &= not (known.written or known.moves_generators)
        self._state = self._state.only(known.written, known.moves_generators)
        if self._inputs.are_written():
            self._refuse("its forward writes one of its arguments in place. Let it change a copy (`x = x * 2`).")

    def _look_at_results(self, result: Any) -> None:
        """Read what was returned, and follow the gradients that come back."""
        leaves = tree_flatten(result)[0]
        inputs = self._inputs.needing_grad()
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        are_found = all(isinstance(leaf, (Tensor, *SIMPLE)) for leaf in leaves)
        self._may_be_light &= are_found and len(outputs) <= 1 and len(inputs) <= 1
        if not self._kept:
            del self._inputs  # they may lie on the host; backward brings them
        if not self._has_values:
            self._known.is_light = self._may_be_light
            return
        self._returned = _returned(result)
        for number, output in enumerate(outputs):
            output.register_hook(partial(self._keep_gradient, number))
        if self._may_be_light and inputs:
            inputs[0].register_hook(self._compare_share)

    def _keep_gradient(self, number: int, gradient: Tensor) -> None:
        if self._returned is not None:
            self._given[number] = gradient

    def _compare_share(self, gradient: Tensor) -> None:
        """Let later calls be light if no other code uses the argument that needs gradients.

        torch sums the gradients of all uses in the order in which they come. A `LightCall` sums those of a block first,
        which rounds otherwise.
        """
        if self._share is not None:
            most = EQUAL if gradient.device.type == "cpu" else _SAME_SHARE
            self._known.is_light = relative_difference(self._share, projected(gradient)) <= most
            self._share = None

    # --- backward ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block for the first time, or again in backward."""
        if not self._has_run:
            self._has_run = True
            return self._function(*args, **kwargs)
        if self._returned is not None:
            self._inputs = _Inputs(args, kwargs)
        with self._begin_again():
            return self._function(*args, **kwargs)

    def _begin_again(self) -> AbstractContextManager[None]:
        """Check the recomputation that begins, and return the context for it. Forward itself may ask for gradients."""
        if self._returned is not None:
            try:
                self._check(self._returned)
            except (torch.OutOfMemoryError, MemoryError):
                warnings.warn(
                    f"{self._known.name}: there is no room to check in the first batch that recomputing it is exact; "
                    "training goes on without.",
                    stacklevel=2,
                )
            self._returned, self._given = None, {}
            del self._inputs
        return self._state.put_back()

    def _check(self, returned: Reading) -> None:
        """Run the block plainly and as it is checkpointed, and compare."""
        plain = self._repeat(self._function)
        again = self._reader(self._function, "returned", plain)
        self._refuse_difference(returned, again, plain, "run plainly from where it began")
        self._known.constant_outputs = plain.constant_outputs
        if self._is_light(plain):
            self._share = plain.gradients.values[0] if plain.gradients.values else None
            self._known.is_light = not self._inputs.needing_grad()
        else:
            again = self._reader(self._checkpointed, "gradients")
            self._refuse_difference(plain.gradients, again, plain, "when it was recomputed")

    def _is_light(self, plain: "_Run") -> bool:
        """Whether a `LightCall` returns and gives what the plain run does.

        Its forward pass runs without gradients, in which some kernels are others (attention whose mask is trained).
        """
        if not (self._may_be_light and plain.has_own_leaves and self._known.takes_light(*self._inputs.given)):
            return False
        try:
            first = self._repeat(self._light)
        except InexactRecomputationError:
            return False
        return all(
            self._difference(getattr(plain, read), self._reader(self._light, read, first), plain) is None
            for read in ("returned", "gradients")
        )

    def _reader(self, function: Function, read: str, first: "_Run | None" = None) -> Callable[[], Reading]:
        """A function that reads the block's first run, and with each further call another one."""
        runs = [] if first is None else [first]
        return lambda: getattr(runs.pop() if runs else self._repeat(function), read)

    def _light(self, *args: Any, **kwargs: Any) -> Any:
        return LightCall(self._function, self._known).run(args, kwargs)

    def _checkpointed(self, *args: Any, **kwargs: Any) -> Any:
        return self._known.run(self._function, self._kept, args, kwargs, None)

    def _repeat(self, function: Function) -> "_Run":
        """Run the block once more from where it began; afterwards everything is as before."""
        # What is saved here is no part of the recomputation in which it happens.
        apart = saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
        with drawing_from(self._random), self._state.put_back(), apart:
            try:
                return _Run(function, self._inputs, dict(self._known.module.named_parameters()), self._given)
            except (InexactRecomputationError, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                self._refuse(f"run once more, it fails ({type(error).__name__}: {error}).", error)

    # --- refusals ---

    def _refuse(self, found: str, cause: Exception | None = None) -> NoReturn:
        raise InexactRecomputationError(self._known.name, found) from cause

    def _difference(self, first: Reading, again: Callable[[], Reading], plain: "_Run") -> str | None:
        device = self._known.devices[-1]
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else plain.dtype
        return explain_difference(first, again, dtype, device)

    def _refuse_difference(self, first: Reading, again: Callable[[], Reading], plain: "_Run", when: str) -> None:
        found = self._difference(first, again, plain)
        if found is not None:
            self._refuse(
                f"{found} {when}. It reads something that changes or that has changed since its forward, and that its "
                "modules don't show."
            )


def _refuse_caches(block: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            raise ValueError(
                f"{block} was called with a key/value cache ({type(value).__name__}) while gradients are on; "
                "recomputing it would fill the cache twice. Call the model with `use_cache=False` in training."
            )


# --- one run of a block -----------------------------------------------------------------------------------------------


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _returned(result: Any) -> Reading:
    outputs = _tensors_in(result)
    return Reading([f"output {number + 1}" for number in range(len(outputs))], outputs)


class _Inputs:
    """Arguments of a block."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = (args, kwargs)
        self._versions = [(tensor, tensor._version) for tensor in _tensors_in(self.given)]

    def are_written(self) -> bool:
        """Whether any tensor among them has been written in place."""
        return any(tensor._version != version for tensor, version in self._versions)

    def needing_grad(self) -> list[Tensor]:
        """Those of the tensors that need gradients, each once."""
        return list(dict.fromkeys(tensor for tensor, _ in self._versions if tensor.requires_grad))

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
                    new[id(value)] = leaves[-1].view_as(leaves[-1])
            return new[id(value)]

        args, kwargs = tree_map(renewed, self.given)
        return args, kwargs, leaves


class _Run:
    """One forward and backward pass of a block by itself.

    Attributes:
        returned: What it returned.
        gradients: The gradients that it gave.
        has_own_leaves: Whether its outputs depend on nothing that needs gradients but its inputs and parameters.
        constant_outputs: Numbers of the outputs that need no gradients.
        dtype: The coarsest type of what it returned.
    """

    def __init__(
        self, function: Function, inputs: _Inputs, parameters: dict[str, nn.Parameter], given: dict[int, Tensor]
    ) -> None:
        with torch.enable_grad():
            args, kwargs, leaves = inputs.apart()
            result = function(*args, **kwargs)
        self.returned = _returned(result)
        outputs, everything = _tensors_in(result), tree_flatten(result)[0]
        self.constant_outputs = tuple(
            number for number, leaf in enumerate(everything) if isinstance(leaf, Tensor) and not leaf.requires_grad
        )
        dtypes = (one.dtype for one in outputs if one.is_floating_point())
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        differentiable = [output for output in outputs if output.requires_grad]
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        wanted = [*leaves, *trained.values()]
        self.has_own_leaves = _leaves_of(differentiable) <= set(map(id, wanted))
        weights = [_weight_of(output, given.get(number)) for number, output in enumerate(differentiable)]
        edges = [get_gradient_edge(output) for output in differentiable]
        del result, outputs, everything, args, kwargs, differentiable  # not needed while gradients are computed
        gradients: Sequence[Tensor | None] = []
        if edges and wanted:
            gradients = torch.autograd.grad(edges, wanted, weights, allow_unused=True)
        names = [f"input {number + 1}" for number in range(len(leaves))] + [f"`{name}`" for name in trained]
        self.gradients = Reading([f"the gradient of {name}" for name in names[: len(gradients)]], gradients)


def _weight_of(output: Tensor, given: Tensor | None) -> Tensor:
    """The gradient of an output, or one that no symmetry of a block makes vanish."""
    if given is not None and given.shape == output.shape:
        read = projected(given)
        if bool(read.isfinite().all()) and bool(read.any()):
            return given
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
