"""Run a block so that it is recomputed in backward, at the cost of torch's own checkpoint or below it.

Two ways give the plain run's gradients. `torch.utils.checkpoint`, non-reentrant, takes any block; what the block was
seen to write is put back around its recomputation. Its cost are hooks on every tensor that is saved. `_Recomputed`, an
`autograd.Function`, saves a block's inputs alone and has none; it takes blocks whose outputs depend on nothing that is
trained but their arguments and parameters, and which write nothing.

Everything is found out in the first call of a block, in each training mode (`_FirstCall`); later calls look at nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_memfit.checkpointing.check import (
    InexactRecomputationError,
    Inputs,
    Reading,
    Run,
    drawing_from,
    random_states,
    refuse_unless_equal,
    set_random_states,
)
from lightning_memfit.checkpointing.forward import ReplacedForward
from lightning_memfit.checkpointing.offload import OffloadPool
from lightning_memfit.checkpointing.policies import (
    Choice,
    WatchedWrites,
    compiled_contexts,
    kept_operators,
    selective_contexts,
)
from lightning_memfit.memory.state import Group, State, groups_of

_CPU = torch.device("cpu")
_Function = Callable[..., Any]


def in_trace() -> bool:
    """Whether tensors are fake, as in a trace: they have no values."""
    return torch._guards.detect_fake_mode(()) is not None


class CheckpointedForward(ReplacedForward):
    """Replaces the `forward` of one block that is recomputed.

    Attributes:
        choice: The activations that are kept.
        inputs_on_host: Pool that keeps the block's inputs in host memory; None keeps them on the device.
    """

    def __init__(self, block: nn.Module, choice: Choice) -> None:
        super().__init__(block)
        self.choice = choice
        self.inputs_on_host: OffloadPool | None = None
        self._knowledge = Knowledge((block,))

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; with gradients on, keep only the activations that the choice keeps."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return self.run(self.inner, self._knowledge, args, kwargs)

    def run(self, function: _Function, known: "Knowledge", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of the block so that it is recomputed in backward.

        Args:
            function: What to run.
            known: Of the modules that it runs.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        kept = kept_operators(self.choice)
        if torch.compiler.is_compiling():
            if self.inputs_on_host is not None:
                raise NotImplementedError(f"the inputs of {type(self.block).__name__} are offloaded: not compiled.")
            known.refuse_compiling()
            options: dict[str, Any] = {"context_fn": compiled_contexts(kept)} if kept else {}
            return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        around = None if self.inputs_on_host is None else partial(self.inputs_on_host.saving, self.block)
        return known.run(function, kept, args, kwargs, around)


class Knowledge:
    """What the first calls of some modules have shown, by which later ones are run. A copy begins without any.

    Args:
        modules: What is run together.

    Attributes:
        settled: Training modes in which they have been called.
        traced: The same of calls in a trace, whose tensors have no values.
        written: Groups of their state that a call writes, which are put back around a recomputation.
        moves_generators: Whether a call draws from Python's or NumPy's global generator.
        is_light: Whether `_Recomputed` gives what torch's checkpoint does.
        constant_outputs: Numbers of the outputs that need no gradients.
        parameters: What is trained with them.
        devices: The CPU, and the accelerators that they or their arguments lie on.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self.settled: set[bool] = set()
        self.traced: set[bool] = set()
        self.written: tuple[Group, ...] = ()
        self.moves_generators = False
        self.is_light = False
        self.constant_outputs: tuple[int, ...] = ()
        self.parameters: list[nn.Parameter] = []
        self.devices: tuple[torch.device, ...] = (_CPU,)
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._markers: tuple[Tensor, ...] = ()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Knowledge, (self.modules,)

    @property
    def name(self) -> str:
        """What errors call the modules."""
        return " and ".join(dict.fromkeys(type(module).__name__ for module in self.modules))

    def refuse(self, found: str, cause: Exception | None = None) -> NoReturn:
        """Raise the error that the modules can't be recomputed exactly."""
        raise InexactRecomputationError(self.name, found) from cause

    def run(
        self,
        function: _Function,
        kept: frozenset[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> Any:
        """Run a function of the modules so that it is recomputed in backward.

        Args:
            function: What to run.
            kept: Operators whose outputs are kept.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            around: Makes the context in which inputs are saved.
        """
        mode = self.modules[0].training
        if mode not in self.settled and not (mode in self.traced and in_trace()):
            return _FirstCall(function, self, kept, around).run(args, kwargs)
        return self.run_again(function, kept, args, kwargs, around)

    def run_again(
        self,
        function: _Function,
        kept: frozenset[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> Any:
        """Run it as all calls but the first."""
        if self.is_light and not kept and around is None and self.takes_light(args, kwargs):
            return _LightCall(function, self).run(args, kwargs)
        if self.written or self.moves_generators:
            contexts = partial(_rewinding_contexts, self, kept)
            return self.checkpointed(function, args, kwargs, around, context_fn=contexts)
        if kept:
            return self.checkpointed(function, args, kwargs, around, context_fn=partial(selective_contexts, kept))
        return self.checkpointed(function, args, kwargs, around)

    def checkpointed(
        self,
        function: _Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Callable[[], AbstractContextManager[Any]] | None,
        **options: Any,
    ) -> Any:
        """Run torch's checkpoint, to which positional arguments alone are inputs."""
        if around is None and not self._markers:
            return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        called = _ByPosition(function, len(self._markers), tuple(kwargs))
        with (around or nullcontext)():
            return checkpoint(called, *self._markers, *args, *kwargs.values(), use_reentrant=False, **options)

    def takes_light(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is one for `_Recomputed`."""
        for owner, name, parameter in self._places:
            if owner.get(name) is not parameter:
                self.is_light = self.look_at_parameters() and self.is_light
                return False
        for device in self.devices:
            if torch.is_autocast_enabled(device.type):
                return False
        num_needing_grad = 0
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                num_needing_grad += value.requires_grad
            elif not isinstance(value, _SIMPLE) and _may_need_grad(value):
                return False
        return num_needing_grad <= 1

    # --- what the first call looks at ---

    def children(self) -> list[nn.Module]:
        """The modules and all inside them."""
        return list(dict.fromkeys(child for module in self.modules for child in module.modules()))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name."""
        if len(self.modules) == 1:
            return dict(self.modules[0].named_parameters())
        return dict(nn.ModuleList(self.modules).named_parameters())

    def groups(self) -> tuple[Group, ...]:
        """Their state; without weights that DeepSpeed gives and takes while they run."""
        is_gathered = any(hasattr(parameter, "ds_id") for parameter in self.parameters)
        return tuple(one for one in groups_of(self.modules) if not (is_gathered and one.kind == "parameters"))

    def look_at_parameters(self) -> bool:
        """Note the parameters that there are now, and return whether `_Recomputed` can take them.

        It gives back all gradients of a block at once. Where one is used up as soon as it is there (a step in backward,
        masters on the host), torch's checkpoint needs less memory, as it does under strategies that shard.
        """
        self._places = [
            (child._parameters, name, parameter)
            for child in self.children()
            for name, parameter in child._parameters.items()
            if parameter is not None
        ]
        self.parameters = list(dict.fromkeys(parameter for _, _, parameter in self._places))
        if any(isinstance(child, torch.jit.ScriptModule) for child in self.children()):
            return False  # it keeps its parameters elsewhere
        return not (torch.distributed.is_available() and torch.distributed.is_initialized()) and all(
            type(parameter) is nn.Parameter and not parameter._post_accumulate_grad_hooks
            for parameter in self.parameters
        )

    def look_at_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the devices whose random states matter, and those that no positional argument tells `checkpoint`."""
        own = [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]
        devices = {tensor.device for tensor in (*own, *_tensors_inside((args, kwargs)))}
        devices = {device for device in devices if device.type not in ("cpu", "meta")}
        told = {leaf.device for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)}
        self.devices = (_CPU, *sorted(devices, key=str))
        self._markers = tuple(_nothing_on(device) for device in self.devices[1:] if device not in told)

    def refuse_compiling(self) -> None:
        """Raise an error while tracing, unless the block has no buffers, which compiled recomputation writes again.

        It makes the compiler leave the block to eager execution; with fullgraph=True the error reaches the user.
        """
        if any(True for module in self.modules for _ in module.buffers()):
            raise NotImplementedError(f"{self.name} has buffers, which recomputation might change: not compiled.")


@lru_cache
def _nothing_on(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _tensors_inside(value: Any) -> list[Tensor]:
    """Tensors in a structure, and in the attributes of objects in it."""
    found = []
    for leaf in tree_flatten(value)[0]:
        inside = [leaf]
        if is_dataclass(leaf) or (hasattr(leaf, "__dict__") and not isinstance(leaf, (Tensor, nn.Module, type))):
            inside = tree_flatten(dict(getattr(leaf, "__dict__", {})))[0]
        found += [one for one in inside if isinstance(one, Tensor)]
    return found


# --- torch's checkpoint -----------------------------------------------------------------------------------------------


def _rewinding_contexts(known: Knowledge, kept: frozenset[Any]) -> tuple[Any, Any]:
    """Contexts of a block that writes state: its recomputation begins where its call began, and leaves no trace."""
    forward, recompute = selective_contexts(kept)
    saved: list[State] = []

    def save() -> AbstractContextManager[None]:
        saved.append(State(known.written, has_generators=known.moves_generators))
        return nullcontext()

    return _Inside(save, forward), _Inside(lambda: saved[0].put_back(), recompute)


class _Inside(AbstractContextManager[None]):
    """A context inside another, which is made when it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]], context: AbstractContextManager[Any]) -> None:
        self._make = make
        self._context = context

    @override
    def __enter__(self) -> None:
        self._outer = self._make()
        self._outer.__enter__()
        self._context.__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._outer.__exit__(*error)


class _ByPosition:
    """A function that is given its keyword arguments by position, behind tensors that only tell devices."""

    def __init__(self, function: _Function, num_markers: int, keys: tuple[str, ...]) -> None:
        self._function = function
        self._num_markers = num_markers
        self._keys = keys

    def __call__(self, *args: Any) -> Any:
        end = len(args) - len(self._keys)
        return self._function(*args[self._num_markers : end], **dict(zip(self._keys, args[end:], strict=True)))


# --- the light way ----------------------------------------------------------------------------------------------------

_SAME_SHARE = 1e-2
"""Largest relative difference of two gradients of one tensor that may come from rounding; other uses add more."""

_SIMPLE = (bool, int, float, str, torch.dtype, torch.device, type(None))


def _may_need_grad(value: Any) -> bool:
    """Whether a tensor that needs gradients may lie inside an argument, where `_Recomputed` would miss it."""
    if isinstance(value, (tuple, list)):
        return any([item.requires_grad if isinstance(item, Tensor) else _may_need_grad(item) for item in value])
    return not isinstance(value, _SIMPLE)


def _in_function_transform() -> bool:
    """Whether a transform of `torch.func` runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _has_statistics(module: nn.Module) -> bool:
    """Whether a module is known to write its buffers, before a trace has seen it."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats


def _refuse_caches(block: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            raise ValueError(
                f"{block} was called with a key/value cache ({type(value).__name__}) while gradients are on; "
                "recomputing it would fill the cache twice. Call the model with `use_cache=False` in training."
            )


class _OpaqueResultError(Exception):
    """A block returned an object in which tensors can't be found."""


class _LightCall:
    """One call of a block: what `_Recomputed` needs to run it again."""

    __slots__ = ("args", "function", "keys", "known", "kwargs", "numbers", "spec", "states")

    def __init__(self, function: _Function, known: Knowledge) -> None:
        self.function = function
        self.known = known
        self.spec: Any = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block for the first time."""
        self.args, self.kwargs = list(args), dict(kwargs)
        self.numbers = [number for number, value in enumerate(args) if isinstance(value, Tensor)]
        self.keys = [key for key, value in kwargs.items() if isinstance(value, Tensor)]
        tensors = [*map(args.__getitem__, self.numbers), *map(kwargs.__getitem__, self.keys)]
        self._put([None] * len(tensors))
        self.states = random_states(self.known.devices)
        result = _Recomputed.apply(self, len(tensors), *tensors, *self.known.parameters)  # type: ignore[no-untyped-call]
        return result if self.spec is None else tree_unflatten(result, self.spec)

    def call(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run the block with these tensors as arguments, and return the tensors among its results."""
        self._put(tensors)
        result = self.function(*self.args, **self.kwargs)
        self._put([None] * len(tensors))
        if isinstance(result, Tensor):
            return (result,)
        leaves, self.spec = tree_flatten(result)
        if not all(isinstance(leaf, (Tensor, *_SIMPLE)) for leaf in leaves):
            raise _OpaqueResultError
        return tuple(leaves)

    def again(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run the block with the random numbers of its first run."""
        now = random_states(self.states)
        set_random_states(self.states)
        try:
            return self.call(tensors)
        finally:
            set_random_states(now)

    def _put(self, tensors: Sequence[Tensor | None]) -> None:
        for number, tensor in zip(self.numbers, tensors, strict=False):
            self.args[number] = tensor
        for key, tensor in zip(self.keys, tensors[len(self.numbers) :], strict=True):
            self.kwargs[key] = tensor


class _Recomputed(torch.autograd.Function):
    """Runs a block without a graph, and once more with one in backward.

    Parameters are inputs, so that gradients reach them as they do in a plain run: through hooks, accumulation and
    `autograd.grad`.
    """

    @staticmethod
    @override
    def forward(ctx: Any, call: _LightCall, num_inputs: int, *tensors: Tensor) -> Any:
        inputs = tensors[:num_inputs]
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        results = call.call(inputs)
        if call.known.constant_outputs:
            ctx.mark_non_differentiable(*(results[number] for number in call.known.constant_outputs))
        return results[0] if call.spec is None else results

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call, inputs, needs_grad = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:]
        creates_graph = torch.is_grad_enabled()
        if not creates_graph:
            inputs = [one.detach().requires_grad_(needs) for one, needs in zip(inputs, needs_grad, strict=False)]
        edges, given = [], []
        with torch.enable_grad():
            for result, gradient in zip(call.again(inputs), gradients, strict=True):
                if gradient is not None and result.requires_grad:
                    edges.append(get_gradient_edge(result))
                    given.append(gradient)
            result = None  # its memory is free before gradients are computed
        wanted = [one for one, needs in zip((*inputs, *call.known.parameters), needs_grad, strict=True) if needs]
        if not (edges and wanted):
            return None, None, *[None] * len(needs_grad)
        found = torch.autograd.grad(edges, wanted, given, allow_unused=True, create_graph=creates_graph)
        rest = iter(found)
        return None, None, *[next(rest) if needs else None for needs in needs_grad]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


# --- the first call ---------------------------------------------------------------------------------------------------


class _FirstCall:
    """The first call of a block in a training mode: it finds out what the block writes, and checks its recomputation.

    It runs the block plainly before, and as it is checkpointed once more when backward reaches it. A trace, in which
    tensors have no values, sees only what is written.

    Args:
        function: The block.
        known: Gets what is found.
        kept: Operators whose outputs are kept.
        around: Makes the context in which inputs are saved.
    """

    def __init__(
        self,
        function: _Function,
        known: Knowledge,
        kept: frozenset[Any],
        around: Callable[[], AbstractContextManager[Any]] | None,
    ) -> None:
        self._function = function
        self._known = known
        self._kept = kept
        self._around = around
        self._may_be_light = around is None and not kept
        self._has_values = not in_trace()
        self._has_run = self._is_over = False
        self._plain: Run | None = None
        self._given: Tensor | None = None
        self._share: Reading | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block."""
        known = self._known
        if _in_function_transform():
            known.refuse(
                "it is called inside a transform of `torch.func` (`vmap`, `grad`, `jvp`, ...) or forward-mode "
                "differentiation, whose tensors don't exist any more when it is recomputed."
            )
        _refuse_caches(known.name, (*args, *kwargs.values()))
        known.look_at_devices(args, kwargs)
        can_be_light = known.look_at_parameters() and not any(map(_has_statistics, known.children()))
        known.is_light = self._may_be_light and can_be_light and (known.is_light or not known.settled)
        self._state = State(known.groups(), copies_tensors=self._has_values)
        self._inputs = Inputs(args, kwargs)
        self._random = random_states(known.devices) if self._has_values else {}
        if self._has_values:
            self._run_plainly()
        with self._refusing_errors():
            result = self._run_checkpointed(args, kwargs)
        self._note_written()
        self._refuse_written_arguments()
        if self._plain is not None:
            self._compare_results(result)
        self._look_at_users(result)
        self._set_aside(known.written)
        self._is_over = True
        if not self._kept:
            del self._inputs  # they may lie on the host; backward brings them
        (known.settled if self._has_values else known.traced).add(known.modules[0].training)
        return result

    # --- forward ---

    def _run_plainly(self) -> None:
        known = self._known
        self._plain = Run(self._function, self._inputs, known.named_parameters(), self._sides)
        self._note_written()
        self._refuse_written_arguments()
        known.is_light &= self._plain.has_own_leaves
        known.constant_outputs = self._plain.constant_outputs
        self._state.only(known.written, known.moves_generators).restore()
        set_random_states(self._random)

    def _run_checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._known
        if known.is_light and not self._has_values and known.takes_light(args, kwargs):
            try:
                return _LightCall(self, known).run(args, kwargs)
            except _OpaqueResultError:
                known.is_light = self._has_run = False
        if not self._kept:
            return known.checkpointed(self, args, kwargs, self._around)
        writes = WatchedWrites()
        forward, recompute = selective_contexts(self._kept, writes)
        contexts = (forward, _Inside(self._begin_again, recompute))  # outside of the mode that hands out what was kept
        result = known.checkpointed(self._function, args, kwargs, self._around, context_fn=lambda: contexts)
        if writes.found:
            known.refuse("what a selective choice keeps of it is changed in place afterwards. Or use mode='full'.")
        return result

    def _note_written(self) -> None:
        known = self._known
        known.written = tuple(dict.fromkeys((*known.written, *self._state.changed())))
        known.moves_generators |= self._state.have_generators_moved()
        known.is_light &= not (known.written or known.moves_generators)

    def _refuse_written_arguments(self) -> None:
        if self._inputs.are_written():
            self._known.refuse("its forward writes one of its arguments in place. Let it change a copy (`x = x * 2`).")

    def _sides(self) -> list[Tensor]:
        """Tensors with a graph that the block has just left in attributes: further outputs."""
        values = (value for group in self._state.changed() for value in group.values().values())
        return [value for value in values if isinstance(value, Tensor) and value.grad_fn is not None]

    def _compare_results(self, result: Any) -> None:
        assert self._plain is not None
        first = [self._plain.returned]

        def again() -> Reading:
            return first.pop() if first else self._repeat(self._function).returned

        found = "run a second time from the state in which it began, its {what} was another (relative difference "
        found += "{error}). It reads something that changes and that its modules don't show."
        self._refuse_unless_equal(Reading.of_outputs(result), again, found, self._plain)

    def _look_at_users(self, result: Any) -> None:
        """Find out whether other code uses the argument that needs gradients, too.

        torch sums the gradients of all uses in the order in which they come. `_Recomputed` sums those of a block first,
        which rounds otherwise.
        """
        known = self._known
        leaves = tree_flatten(result)[0]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        known.is_light &= len(outputs) <= 1 and all(isinstance(leaf, (Tensor, *_SIMPLE)) for leaf in leaves)
        inputs = self._inputs.needing_grad()
        if not (known.is_light and inputs and outputs and self._plain):
            return
        known.is_light = False

        def compare(gradient: Tensor) -> None:
            if self._share is not None:
                known.is_light = self._share.difference(Reading.of_outputs(gradient))[0] <= _SAME_SHARE
                self._share = None

        outputs[0].register_hook(self._keep_gradient)
        inputs[0].register_hook(compare)

    def _keep_gradient(self, gradient: Tensor) -> None:
        self._given = gradient

    def _set_aside(self, written: Sequence[Group]) -> None:
        """Keep of the state what is put back for the recomputation, and what tells changes of attributes by others."""
        attributes = [group for group in self._state.groups if group.kind == "attributes"]
        self._attributes = State(attributes, copies_tensors=False, has_generators=False) if self._plain else None
        self._state = self._state.only(written, self._known.moves_generators)

    # --- backward ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block for the first time, or again in backward."""
        if not self._has_run:
            self._has_run = True
            return self._function(*args, **kwargs)
        if self._is_over and self._plain is not None:
            self._inputs = Inputs(args, kwargs)
        with self._begin_again():
            return self._function(*args, **kwargs)

    def _begin_again(self) -> AbstractContextManager[None]:
        """Check the recomputation that begins, and return the context for it. Forward itself may ask for gradients."""
        if self._is_over and self._plain is not None:
            self._check(self._plain)
            if self._given is not None:
                self._share = self._repeat(self._again, self._given).reading.first(1)
            self._plain = self._given = None
            del self._inputs
        return self._state.put_back()

    def _check(self, plain: Run) -> None:
        """Run the block as it is checkpointed, and compare gradients with those of its plain run."""
        self._look_for_others()
        found = "{what} was another when it was recomputed (relative difference {error}). It reads something that has "
        found += "changed since its forward, and that its modules don't show."

        def again() -> Reading:
            return self._repeat(self._again).reading

        self._refuse_unless_equal(plain.reading, again, found, plain)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        return self._known.run_again(self._function, self._kept, args, kwargs)

    def _look_for_others(self) -> None:
        """Attributes that its owner sets for the call alone are put back as well."""
        assert self._attributes is not None
        changed = self._attributes.changed()
        self._known.written = tuple(dict.fromkeys((*self._known.written, *changed)))
        self._known.is_light &= not changed
        self._state = self._state.joined(self._attributes.only(changed, has_generators=False))

    def _repeat(self, function: _Function, given: Tensor | None = None) -> Run:
        """Run the block once more from where it began; afterwards everything is as before."""
        # What is saved here is no part of the recomputation in which it happens.
        apart = saved_tensors_hooks(Tensor.detach, _unchanged)
        with drawing_from(self._random), self._state.put_back(), apart, self._refusing_errors():
            return Run(function, self._inputs, self._known.named_parameters(), self._sides, given)

    @contextmanager
    def _refusing_errors(self) -> Iterator[None]:
        """What fails here has run plainly before."""
        try:
            yield
        except (InexactRecomputationError, _OpaqueResultError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if self._plain is None:  # of a trace
                raise
            self._known.refuse(f"checkpointed, it fails ({type(error).__name__}: {error}).", error)

    def _refuse_unless_equal(self, first: Reading, again: Callable[[], Reading], found: str, plain: Run) -> None:
        device = self._known.devices[-1]
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else plain.dtype
        refuse_unless_equal(self._known.name, first, again, dtype, found, device)
