"""Run a block so that it is recomputed in backward, at the cost of torch's own checkpoint or below it.

Two ways give the plain run's gradients. `torch.utils.checkpoint`, non-reentrant, takes any block; what the block was
seen to write is put back around its recomputation. Its cost are hooks on every tensor that is saved. `LightCall` saves
a block's inputs alone and has none; it takes blocks that write nothing, and whose outputs depend on nothing that is
trained but their arguments and parameters.

Which way a block takes, its first call finds out (`check.FirstCall`); later calls look at nothing.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_memfit.checkpointing.policies import selective_contexts
from lightning_memfit.memory.generators import drawing_from, random_states
from lightning_memfit.memory.state import Group, State, groups_of

Function = Callable[..., Any]
Around = Callable[[], AbstractContextManager[Any]] | None
"""Makes the context in which a block's inputs are saved."""

SIMPLE = (bool, int, float, str, torch.dtype, torch.device, type(None))
_CPU = torch.device("cpu")


class ReplacedForward:
    """Replaces the `forward` of one block, which subclasses run in their own way.

    It is an object and not a closure, so that a deep copy of the block calls the copy.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.shadowed = vars(block).get("forward")
        self.__wrapped__ = self.shadowed or type(block).forward  # for inspect.signature

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward.

        Raises:
            ValueError: If it computes derivatives by itself in a way that torch allows under no checkpointing.
        """
        try:
            if self.shadowed is not None:
                return self.shadowed(*args, **kwargs)
            return type(self.block).forward(self.block, *args, **kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise ValueError(
                f"{type(self.block).__name__} can't be checkpointed or offloaded: {error} Name the others in `blocks`, "
                "or give it 'none' in `choices`."
            ) from error


def in_trace() -> bool:
    """Whether tensors are fake, as in a trace: they have no values."""
    return torch._guards.detect_fake_mode(()) is not None


class Knowledge:
    """What the first calls of a block have shown, by which later ones are run. A copy begins without any.

    Args:
        module: The block.

    Attributes:
        name: What errors call it.
        settled: Training modes in which it has been called.
        traced: The same of calls in a trace, whose tensors have no values.
        written: Groups of their state that a call writes, which are put back around a recomputation.
        moves_generators: Whether a call draws from Python's or NumPy's global generator.
        is_light: Whether a `LightCall` gives what torch's checkpoint does.
        constant_outputs: Numbers of the outputs that need no gradients.
        has_script: Whether part of it is TorchScript.
        parameters: What it trains.
        devices: The CPU, and the accelerators that it and its positional arguments lie on.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.name = type(module).__name__
        self.settled: set[bool] = set()
        self.traced: set[bool] = set()
        self.written: tuple[Group, ...] = ()
        self.moves_generators = False
        self.is_light = False
        self.constant_outputs: tuple[int, ...] = ()
        self.has_script = False
        self.parameters: list[nn.Parameter] = []
        self.devices: tuple[torch.device, ...] = (_CPU,)
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._markers: tuple[Tensor, ...] = ()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Knowledge, (self.module,)

    def is_new(self) -> bool:
        """Whether the next call is the first in this training mode."""
        mode = self.module.training
        return mode not in self.settled and not (mode in self.traced and in_trace())

    def run(
        self, function: Function, kept: frozenset[Any], args: tuple[Any, ...], kwargs: dict[str, Any], around: Around
    ) -> Any:
        """Run a function of the block so that it is recomputed in backward, as all calls but the first."""
        if self.is_light and not kept and around is None and self.takes_light(args, kwargs):
            return LightCall(function, self).run(args, kwargs)
        options = {}
        if self.written or self.moves_generators:
            options = {"context_fn": partial(_rewinding_contexts, self, kept)}
        elif kept:
            options = {"context_fn": partial(selective_contexts, kept)}
        return self.checkpointed(function, args, kwargs, around, **options)

    def checkpointed(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], around: Around, **options: Any
    ) -> Any:
        """Run torch's checkpoint, which saves positional arguments and the random states of the devices of these."""
        if self.has_script:
            options["early_stop"] = False  # by an exception, which TorchScript turns into another
        if around is None and not self._markers:
            return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        called = _ByPosition(function, len(self._markers), tuple(kwargs))
        with (around or nullcontext)():
            return checkpoint(called, *self._markers, *args, *kwargs.values(), use_reentrant=False, **options)

    def takes_light(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is one for `LightCall`: with the same weights, without autocast, and one input to train."""
        for owner, name, parameter in self._places:
            if owner.get(name) is not parameter:
                self.is_light = self.look_at_parameters() and self.is_light
                return False
        for device in self.devices:
            if torch.is_autocast_enabled(device.type):
                return False
        num_trained = 0
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                num_trained += value.requires_grad
            elif not isinstance(value, SIMPLE) and _may_need_grad(value):
                return False
        return num_trained <= 1

    # --- what the first call looks at ---

    def groups(self) -> tuple[Group, ...]:
        """Its state; without weights that DeepSpeed gives and takes while it runs."""
        is_gathered = any(hasattr(parameter, "ds_id") for parameter in self.parameters)
        return tuple(one for one in groups_of([self.module]) if not (is_gathered and one.kind == "parameters"))

    def look_at_parameters(self) -> bool:
        """Note the parameters that there are now, and return whether a `LightCall` can take them.

        It gives back all gradients of a block at once. Where one is used up as soon as it is there (a step in backward,
        masters on the host), torch's checkpoint needs less memory, as it does under strategies that shard.
        """
        children = list(self.module.modules())
        self.has_script = any(isinstance(child, torch.jit.ScriptModule) for child in children)
        self._places = [
            (child._parameters, name, parameter)
            for child in children
            for name, parameter in child._parameters.items()
            if parameter is not None
        ]
        self.parameters = list(dict.fromkeys(parameter for _, _, parameter in self._places))
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return is_alone and not any(
            type(parameter) is not nn.Parameter or parameter._post_accumulate_grad_hooks
            for parameter in self.parameters
        )

    def look_at_devices(self, inputs: Sequence[Tensor]) -> None:
        """Note the devices whose random states matter.

        Args:
            inputs: Those among positional arguments, of whose devices `checkpoint` keeps the random states by itself.
        """
        tensors = (*self.module.parameters(), *self.module.buffers(), *inputs)
        devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        self.devices = (_CPU, *sorted(devices, key=str))
        further = sorted(devices - {tensor.device for tensor in inputs}, key=str)
        self._markers = tuple(torch.empty(0, device=device) for device in further)


# --- torch's checkpoint -----------------------------------------------------------------------------------------------


def _rewinding_contexts(known: Knowledge, kept: frozenset[Any]) -> tuple[Any, Any]:
    """Contexts of a block that writes state: its recomputation begins where its call began, and leaves no trace."""
    forward, recompute = selective_contexts(kept)
    saved: list[State] = []

    def save() -> AbstractContextManager[None]:
        saved.append(State(known.written, has_generators=known.moves_generators))
        return nullcontext()

    return Inside(save, forward), Inside(lambda: saved[0].put_back(), recompute)


class Inside(AbstractContextManager[None]):
    """A context inside another, which is made when it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]], inner: AbstractContextManager[Any]) -> None:
        self._make = make
        self._inner = inner

    @override
    def __enter__(self) -> None:
        self._outer = self._make()
        self._outer.__enter__()
        self._inner.__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


class _ByPosition:
    """A function that is given its keyword arguments by position, behind tensors that only tell devices."""

    def __init__(self, function: Function, num_markers: int, keys: tuple[str, ...]) -> None:
        self._function = function
        self._num_markers = num_markers
        self._keys = keys

    def __call__(self, *args: Any) -> Any:
        end = len(args) - len(self._keys)
        return self._function(*args[self._num_markers : end], **dict(zip(self._keys, args[end:], strict=True)))


# --- the light way ----------------------------------------------------------------------------------------------------


def _may_need_grad(value: Any) -> bool:
    """Whether a tensor that needs gradients may lie inside an argument, where a `LightCall` would miss it."""
    if isinstance(value, (tuple, list)):
        return any(item.requires_grad if isinstance(item, Tensor) else _may_need_grad(item) for item in value)
    return not isinstance(value, SIMPLE)


class OpaqueResultError(Exception):
    """A block returned an object in which tensors can't be found."""


class LightCall:
    """One call of a block by an `autograd.Function`, without hooks on what is saved."""

    __slots__ = ("args", "function", "keys", "known", "kwargs", "numbers", "spec", "states")

    def __init__(self, function: Function, known: Knowledge) -> None:
        self.function = function
        self.known = known
        self.spec: Any = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block for the first time.

        Raises:
            OpaqueResultError: If tensors may lie where they can't be found.
        """
        self.args, self.kwargs = list(args), dict(kwargs)
        self.numbers = [number for number, value in enumerate(args) if isinstance(value, Tensor)]
        self.keys = [key for key, value in kwargs.items() if isinstance(value, Tensor)]
        tensors = [*map(args.__getitem__, self.numbers), *map(kwargs.__getitem__, self.keys)]
        self._put([None] * len(tensors))  # autograd holds them
        self.states = random_states(self.known.devices)
        result = _Recomputed.apply(self, len(tensors), *tensors, *self.known.parameters)  # type: ignore[no-untyped-call]
        return result if self.spec is None else tree_unflatten(result, self.spec)

    def call(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run the block with these tensors as arguments, and return what its result consists of."""
        self._put(tensors)
        result = self.function(*self.args, **self.kwargs)
        self._put([None] * len(tensors))
        if isinstance(result, Tensor):
            return (result,)
        leaves, self.spec = tree_flatten(result)
        if not all(isinstance(leaf, (Tensor, *SIMPLE)) for leaf in leaves):
            raise OpaqueResultError
        return tuple(leaves)

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
    def forward(ctx: Any, call: LightCall, num_inputs: int, *tensors: Tensor) -> Any:
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
        with torch.enable_grad(), drawing_from(call.states):
            for result, gradient in zip(call.call(inputs), gradients, strict=True):
                if gradient is not None and result.requires_grad:
                    edges.append(get_gradient_edge(result))
                    given.append(gradient)
            result = None  # its memory is free before gradients are computed
        wanted = [one for one, needs in zip((*inputs, *call.known.parameters), needs_grad, strict=True) if needs]
        if not (edges and wanted):
            return None, None, *[None] * len(needs_grad)
        found = iter(torch.autograd.grad(edges, wanted, given, allow_unused=True, create_graph=creates_graph))
        return None, None, *[next(found) if needs else None for needs in needs_grad]
