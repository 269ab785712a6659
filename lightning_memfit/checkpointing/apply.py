"""Apply non-reentrant activation checkpointing block by block, and take it off again.

A block's `forward` is replaced on the instance: `state_dict` keys, `isinstance` and forward hooks (FSDP2's included,
which must not run again when the block is recomputed) stay as they are.
"""

import contextvars
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states
from typing_extensions import override

from lightning_memfit.checkpointing.blocks import BlockGroup
from lightning_memfit.checkpointing.forward import ReplacedForward
from lightning_memfit.checkpointing.offload import OffloadedForward, OffloadPool
from lightning_memfit.checkpointing.policies import (
    CHOICES,
    Choice,
    Contexts,
    compiled_contexts,
    kept_operators,
    selective_contexts,
)
from lightning_memfit.checkpointing.samples import Samples
from lightning_memfit.checkpointing.state import (
    TENSORS,
    BlockState,
    InexactRecomputationError,
    Look,
    Place,
    StatePlaces,
    copied,
    first_difference,
    gradient_hooks_kept,
    in_function_transform,
    in_trace,
)

_WITHOUT_GENERATOR = ("cpu", "meta")
"""Types of devices that have no random state beside the host's."""

_NUM_LOOKS = 2
"""Calls in which the operators of a block are watched, each time that its modules or their training flags change."""


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
        _refuse_caches(self.block, (*args, *kwargs.values()))
        return self.run(self.inner, self._knowledge, *args, **kwargs)

    def run(self, function: Callable[..., Any], knowledge: "Knowledge", *args: Any, **kwargs: Any) -> Any:
        """Run a function of the block so that it is recomputed in backward.

        Args:
            function: What to run.
            knowledge: Of the modules that it runs.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if torch.compiler.is_compiling():
            if self.inputs_on_host is not None:
                raise NotImplementedError(f"the inputs of {type(self.block).__name__} are offloaded: not compiled.")
            knowledge.refuse_compiling()
            return checkpoint(function, *args, use_reentrant=False, **self.options(), **kwargs)
        kept = kept_operators(self.choice)
        call = _Call(function, knowledge, args, kwargs, kept, is_watched=self.inputs_on_host is None)
        contexts = partial(_contexts, self.choice, call)
        if self.inputs_on_host is None:
            saved = call.saved
            result = _checkpointed(call, contexts)
            call.try_again(saved)
            return result
        with self.inputs_on_host.saving(self.block):
            return _checkpointed(call, contexts)

    def options(self) -> dict[str, Any]:
        """Options of `torch.utils.checkpoint` for a compiled block."""
        kept = kept_operators(self.choice)
        return {"context_fn": compiled_contexts(kept)} if kept else {}


def _checkpointed(call: "_Call", contexts: Callable[[], tuple[Any, Any]]) -> Any:
    """Run a call in torch's `checkpoint`, and raise its error behind it.

    With torch 2.11, an error inside leaves modes and hooks on until the error is freed, perhaps in the midst of
    the next run, whose own it then takes off.
    """
    errors: list[BaseException] = []

    def run(*saved: Any) -> Any:
        if not call.is_first:
            return call(*saved)
        try:
            return call(*saved)
        except BaseException as error:
            errors.append(error)

    result = checkpoint(run, *call.saved, use_reentrant=False, context_fn=contexts)
    if errors:
        raise errors.pop()
    return result


def _contexts(choice: Choice, call: "_Call") -> tuple[Any, Any]:
    """Contexts of the forward pass and of the recomputation, whose operators a selective one counts."""
    forward, recompute = selective_contexts(kept_operators(choice))
    return _Around(call, call.from_here_on, forward), _Around(call, call.from_its_beginning, recompute)


class _Around:
    """Contexts, one inside the other, and what the errors of torch in them mean for a block.

    It can be entered anew, for a second backward pass over the same graph.
    """

    def __init__(
        self,
        call: "_Call",
        outer: Callable[[], AbstractContextManager[None]],
        inner: Contexts,
    ) -> None:
        self._call = call
        self._outer = outer
        self._inner = inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._outer())
            for context in self._inner:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError):
            self._call.refuse_limits(error)


_CHANGES_KEPT = "has been mutated"
_LIMITS = {
    "extra time": "it is recomputed more than once (a gradient inside forward, or a graph that is kept), and torch "
    "hands out the kept results of a selective choice only once. Or use mode='full'.",
    _CHANGES_KEPT: "what a selective choice keeps is changed in place afterwards, as nn.GRU and nn.RNN do on the "
    "CPU, and `vmap` where it adds a bias to a product. Or use mode='full'.",
    "not found in storage": "run a second time from the state in which it began, it calls operators that it hadn't "
    "called. It reads something that has changed since its forward, and that its modules, their hooks and the globals "
    "that its code names don't show.",
    "TorchScript interpreter": "it ends with TorchScript, which torch can't leave when it ends a recomputation early.",
    "NestedTensorImpl": "it saves nested tensors for backward, which torch's recomputation doesn't take.",
    "saved tensor hooks": "its forward uses `torch.func.grad`, `vjp`, `jacrev` or `hessian`, which torch doesn't run "
    "in what is recomputed.",
}
"""What the messages of torch's errors mean."""


class Knowledge:
    """What the calls of some modules have shown about their state. A copy begins without any.

    Args:
        modules: What is run together.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self.written: set[Place] = set()
        self._unsteady: dict[tuple[bool, ...], set[int]] = {}
        self._places: StatePlaces | None = None
        self._num_calls: dict[tuple[bool, ...], int] = {}

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Knowledge, (self.modules,)

    @property
    def name(self) -> str:
        """What errors call the modules."""
        return " and ".join(dict.fromkeys(type(module).__name__ for module in self.modules))

    def places(self) -> tuple[StatePlaces, int, set[int]]:
        """Where the modules keep state, how many calls came before, and which saved tensors are unsteady.

        Calls are counted as far as they are watched. A trace counts for itself: its calls have no values, and must
        not stand for those of a run.
        """
        found = list(dict.fromkeys(child for module in self.modules for child in module.modules()))
        if self._places is None or self._places.modules != found:
            self._places = StatePlaces(self.modules)
            self._num_calls, self.written, self._unsteady = {}, set(), {}
        flags = (in_trace(), *(module.training for module in found))
        number = self._num_calls.get(flags, 0)
        if number < _NUM_LOOKS:
            self._num_calls[flags] = number + 1
        return self._places, number, self._unsteady.setdefault(flags, set())

    def steps_in_backward(self) -> bool:
        """Whether weights may change before backward ends."""
        own = [p for module in self.modules for p in module.parameters() if p.requires_grad]
        return not own or any(parameter._post_accumulate_grad_hooks for parameter in own)

    def refuse_compiling(self) -> None:
        """Raise an error while tracing, unless the block has no buffers, which compiled recomputation writes again.

        It makes the compiler leave the block to eager execution; with fullgraph=True the error reaches the user.
        """
        if any(True for module in self.modules for _ in module.buffers()):
            raise NotImplementedError(f"{self.name} has buffers, which recomputation might change: not compiled.")


class _Call:
    """One call of a block: `torch.utils.checkpoint` runs it for the first time and again in backward.

    Tensors among the arguments are kept by autograd (`saved`), except those that the block may write in place: they
    are copied before.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(
        self,
        function: Callable[..., Any],
        knowledge: Knowledge,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept: frozenset[Any],
        is_watched: bool,
    ) -> None:
        if in_function_transform():
            raise InexactRecomputationError(
                knowledge.name,
                "it is called inside a transform of `torch.func` (`vmap`, `grad`, `jvp`, ...) or forward-mode "
                "differentiation, whose tensors don't exist any more when it is recomputed.",
            )
        self._function = function
        self._knowledge = knowledge
        self._places, num_calls, unsteady = knowledge.places()
        looking = num_calls < _NUM_LOOKS
        self._is_watched = looking and is_watched
        self._arguments: tuple[Any, Any] | None = (args, kwargs)
        self._leaves, self._structure = tree_flatten((args, kwargs))
        tensors = [(("argument", i), leaf) for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self._needs_grad = {place[1]: leaf.requires_grad for place, leaf in tensors}
        self._inputs = [(place, leaf) for place, leaf in tensors if type(leaf) in TENSORS]
        self._copies = {place: copied(leaf) for place, leaf in self._inputs if place in knowledge.written}
        held = {place for place, _ in self._inputs} if self._is_watched else set(self._copies)
        self._numbers = [place[1] for place, _ in tensors if place not in held]
        # An alias of the others, without their count of writes, tells `checkpoint` the device.
        self.saved = [
            *(leaf for place, leaf in tensors if place not in held),
            *(leaf.data for place, leaf in tensors if place in held),
        ]
        for number in self._numbers:
            self._leaves[number] = None
        self._objects = [leaf for leaf in self._leaves if leaf is not None and not isinstance(leaf, torch.Tensor)]
        self._state = BlockState(self._places, knowledge.written, self._objects)
        # `checkpoint` keeps the random state of the devices of its arguments, and looks into no object (a sparse tensor
        # of spconv, a dataclass).
        self.saved += [_nothing_on(device) for device in _further_devices(tensors, self._state)]
        self._before = self._state.versions() | {place: tensor._version for place, tensor in self._inputs}
        self._fresh: dict[int, torch.Tensor] = {}
        watched = (*self._state.tensors.items(), *self._inputs) if self._is_watched else ()
        self._look = Look(self._copy, watched, kept) if looking else None
        self._results: list[tuple[str, float]] | None = None
        self._context = contextvars.copy_context()
        self._samples: Samples | None = None
        if not in_trace():  # a trace has no values
            has_own_weights = not (torch.distributed.is_available() and torch.distributed.is_initialized())
            self._samples = Samples(knowledge.name, unsteady, knowledge.steps_in_backward, has_own_weights)
        self._is_compared = self._is_watched and not self._places.is_gathered and self._samples is not None
        is_tried = self._is_compared and num_calls == 0
        self._random_states = _random_states(self.saved) if is_tried else None
        self._asks_gradient = False

    def from_here_on(self) -> AbstractContextManager[None]:
        """In this context, samples of what is saved for backward are taken."""
        return nullcontext() if self._samples is None else self._samples.taken(self._look)

    def refuse_limits(self, error: RuntimeError) -> None:
        """Say in words what an error of torch's means for the block."""
        for message, meaning in _LIMITS.items():
            if message in str(error):
                raise InexactRecomputationError(self._knowledge.name, meaning) from error

    def __call__(self, *saved: Any) -> Any:
        """Run for the first time, or again."""
        if self._arguments is None:
            return self._run_again(saved)
        (args, kwargs), self._arguments = self._arguments, None
        try:
            return self._run_first(args, kwargs)
        except RuntimeError as error:
            self.refuse_limits(error)
            raise

    @property
    def is_first(self) -> bool:
        """Whether it has not run yet."""
        return self._arguments is not None

    def _run_first(self, args: Any, kwargs: Any) -> Any:
        state = self._state
        look = self._look
        if look is None:
            result = self._function(*args, **kwargs)
        else:
            if self._is_compared:
                self._results = look.results
            with look:
                result = self._function(*args, **kwargs)
            self._look = None
            if look.changes_kept:
                raise InexactRecomputationError(self._knowledge.name, _LIMITS[_CHANGES_KEPT])
        inputs = [(place, tensor) for place, tensor in self._inputs if place not in self._copies]
        held = [(place, tensor) for place, tensor in inputs if self._leaves[place[1]] is not None]
        state.end_of_forward(self._knowledge.name, inputs, held, self._before)
        self.saved, self._inputs, self._before = [], [], {}
        return result

    @contextmanager
    def from_its_beginning(self) -> Iterator[None]:
        """In this context all is as it was when the call began, and what is saved is compared."""
        if self._look is not None:  # forward itself asks for a gradient
            self._look.is_paused = self._asks_gradient = True
        try:
            compared = nullcontext() if self._samples is None else self._samples.compared()
            with self._rewound(), compared:
                yield
        finally:
            if self._look is not None:
                self._look.is_paused = False

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        self._fresh = {
            place[1]: copy.detach().requires_grad_(self._needs_grad[place[1]]).clone()
            for place, copy in self._copies.items()
        }
        with self._state.again(self._knowledge.name, self._places):
            yield

    def try_again(self, saved: Sequence[Any]) -> None:
        """Run the first call to its end once more at once, and compare what its operators return.

        A recomputation ends when all that was saved is there, and shows nothing of the operators behind. Nothing is
        saved for backward here: of the first step, backward needs more, where the gradients come on top. In later
        calls the gradients of the step before would be there, too.
        """
        if self._random_states is None or self._asks_gradient:  # a gradient inside needs what would be saved
            return
        inputs = [
            one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one for one in saved
        ]
        with _unseen(self._rewound()), self._random_states(), saved_tensors_hooks(_nothing, _nothing):
            self._run_again(inputs, is_whole=True)
        self._random_states = None

    def _copy(self, place: Place, tensor: torch.Tensor) -> None:
        """Keep a tensor's values before an operator writes it."""
        self._knowledge.written.add(place)
        with _disable_current_modes():  # a selective one would count the operator
            if place in self._before and place not in self._state.tensors:
                self._copies[place] = copied(tensor)
            else:
                self._state.copy(tensor)

    def _run_again(self, saved: Sequence[Any], is_whole: bool = False) -> Any:
        leaves = list(self._leaves)
        for number, tensor in zip(self._numbers, saved, strict=False):
            leaves[number] = tensor
        for number, tensor in self._fresh.items():
            leaves[number] = tensor
        self._fresh = {}
        args, kwargs = tree_unflatten(leaves, self._structure)
        run = partial(self._context.copy().run, self._function)  # context variables are as they were
        with gradient_hooks_kept(self._places, leaves):
            return run(*args, **kwargs) if self._results is None else self._run_compared(run, args, kwargs, is_whole)

    def _run_compared(self, run: Callable[..., Any], args: Any, kwargs: Any, is_whole: bool) -> Any:
        with Look(_ignore, ()) as look:
            try:
                return run(*args, **kwargs)
            except RuntimeError as error:
                self.refuse_limits(error)
                raise
            finally:
                self._compare(look.results, is_whole)

    def _compare(self, results: list[tuple[str, float]], is_whole: bool) -> None:
        assert self._results is not None
        different = first_difference(self._results, results, is_whole)
        if different is not None:
            raise InexactRecomputationError(
                self._knowledge.name,
                f"run a second time from the state in which it began, its operator {different} returned something "
                "else. It reads something that changes and that its modules, their hooks and the globals that its "
                "code names don't show.",
            )


def _ignore(place: Place, tensor: torch.Tensor) -> None:
    pass


def _nothing(value: Any) -> Any:
    """Keep nothing of what a graph saves that is never run backward."""


@contextmanager
def _unseen(context: AbstractContextManager[None]) -> Iterator[None]:
    """Enter and leave a context where no mode sees what it copies: a technique may watch what reads a weight."""
    with _disable_current_modes():
        context.__enter__()
    try:
        yield
    finally:
        with _disable_current_modes():
            context.__exit__(None, None, None)


def _further_devices(tensors: Sequence[tuple[Place, torch.Tensor]], state: BlockState) -> list[torch.device]:
    """Devices of a block's state, and of what its arguments hold, on which none of the arguments lies itself."""
    further = state.devices().difference(tensor.device for _, tensor in tensors)
    return sorted((one for one in further if one.type not in _WITHOUT_GENERATOR), key=str)


@lru_cache
def _nothing_on(device: torch.device) -> torch.Tensor:
    with _disable_current_modes():
        return torch.empty(0, device=device)


def _random_states(tensors: Sequence[torch.Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """Torch's own random states as they are now, as a context in which they are so again."""
    devices, states = get_device_states(*tensors)
    kinds = [tensor.device.type for tensor in tensors if tensor.device.type not in _WITHOUT_GENERATOR]
    of_kind = {"device_type": kinds[0]} if kinds else {}  # as `checkpoint` takes it
    with _disable_current_modes():  # what keeps count of a device's memory is not to count it
        of_host = torch.get_rng_state()

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, **of_kind):
            torch.set_rng_state(of_host)
            set_device_states(devices, states, **of_kind)
            yield

    return again


class AppliedCheckpointing:
    """Checkpointing in effect on some blocks; `remove` puts every block back as it was."""

    def __init__(self, forwards: Sequence[ReplacedForward]) -> None:
        self._forwards = list(forwards)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are checkpointed."""
        return len(self._forwards)

    def is_on(self, module: nn.Module) -> bool:
        """Whether these blocks are all that is checkpointed in a module."""
        inside = [child for child in module.modules() if _hugging_face_checkpoints(child) or _is_wrapped(child)]
        return {id(child) for child in inside} == {id(wrapper.block) for wrapper in self._forwards}

    def remove(self) -> None:
        """Restore each block's `forward`. Safe to call twice."""
        while self._forwards:
            wrapper = self._forwards.pop()
            if vars(wrapper.block).get("forward") is not wrapper:
                raise RuntimeError(
                    f"`forward` of a {type(wrapper.block).__name__} was replaced after checkpointing was applied; "
                    "take off what came later first."
                )
            if wrapper.shadowed is None:
                del wrapper.block.forward
            else:
                wrapper.block.forward = wrapper.shadowed


def apply_checkpointing(blocks: Sequence[nn.Module], choices: Sequence[Choice]) -> AppliedCheckpointing:
    """Checkpoint blocks, each by its own choice. Gradients and random numbers are those of the plain run.

    Args:
        blocks: Modules, for example those of `find_blocks`.
        choices: One per block: `none`, `full`, `keep_attention`, `keep_matmul`, `keep_matmul_attention` or `offload`.

    Raises:
        ValueError: If the lengths differ, a choice is unknown, a block is listed twice, or something checkpoints
            already.
    """
    if len(blocks) != len(choices):
        raise ValueError(f"`choices` has {len(choices)} entries for {len(blocks)} blocks; give one per block.")
    unknown = sorted({choice for choice in choices if choice not in CHOICES})
    if unknown:
        raise ValueError(f"`choices` holds {', '.join(map(repr, unknown))}. Choose from {', '.join(CHOICES)}.")
    if len({id(block) for block in blocks}) != len(blocks):
        raise ValueError("`blocks` lists a module twice; list it once (each of its calls is checkpointed).")
    for block in blocks:
        refuse_checkpointed(block)
    pool = OffloadPool()
    forwards: list[ReplacedForward] = [
        OffloadedForward(block, pool) if choice == "offload" else CheckpointedForward(block, choice)
        for block, choice in zip(blocks, choices, strict=True)
        if choice != "none"
    ]
    for wrapper in forwards:
        wrapper.block.forward = wrapper
    return AppliedCheckpointing(forwards)


def refuse_checkpointed(module: nn.Module) -> None:
    """Raise a `ValueError` if anything in a module checkpoints activations already."""
    for name, child in module.named_modules():
        where = f"{type(child).__name__}{f' ({name!r})' if name else ''}"
        if _hugging_face_checkpoints(child):
            raise ValueError(
                f"{where} has Hugging Face gradient checkpointing on already. Call "
                "`model.gradient_checkpointing_disable()` "
                "(and leave `gradient_checkpointing_enable` out), or leave this checkpointing out."
            )
        if _is_wrapped(child):
            raise ValueError(f"{where} is checkpointed already. Remove one of the two.")


def is_checkpointed(module: nn.Module) -> bool:
    """Whether anything in a module checkpoints activations already."""
    return any(_hugging_face_checkpoints(child) or _is_wrapped(child) for child in module.modules())


def _hugging_face_checkpoints(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


def _is_wrapped(module: nn.Module) -> bool:
    return type(module).__name__ == "CheckpointWrapper" or isinstance(vars(module).get("forward"), ReplacedForward)


def disable_caches(module: nn.Module) -> Callable[[], None]:
    """Set `use_cache=False` in every Hugging Face config of a module, with one warning.

    A block that appends to a key/value cache would do so again when it is recomputed.

    Returns:
        A function that restores the settings.
    """
    configs = {id(config): config for config in _configs(module) if getattr(config, "use_cache", False)}
    if configs:
        names = ", ".join(sorted({type(config).__name__ for config in configs.values()}))
        warnings.warn(
            f"`use_cache=True` in {names} makes training keep keys and values it never uses, and cannot work with "
            "activation checkpointing: it is off while checkpointing is applied. Set `model.config.use_cache = "
            "False` to silence this.",
            stacklevel=2,
        )
    for config in configs.values():
        config.use_cache = False

    def enable() -> None:
        for config in configs.values():
            config.use_cache = True

    return enable


def _configs(module: nn.Module) -> Iterator[Any]:
    for child in module.modules():
        config = vars(child).get("config")
        if _is_hugging_face_config(config):
            yield config
            yield from filter(_is_hugging_face_config, vars(config).values())


def _is_hugging_face_config(value: object) -> bool:
    """Whether an attribute is what transformers means by `config`, not a user's own of that name."""
    return any(cls.__name__ in ("PreTrainedConfig", "PretrainedConfig") for cls in type(value).__mro__)


def _refuse_caches(block: nn.Module, values: tuple[Any, ...]) -> None:
    for value in values:
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            raise ValueError(
                f"{type(block).__name__} was called with a key/value cache ({type(value).__name__}) while gradients "
                "are on; recomputing it would fill the cache twice. Call the model with `use_cache=False` in training."
            )


# --- segments of an nn.Sequential -------------------------------------------------------------------------------------

# Segments of about sqrt(n) blocks (Chen et al., 2016, arXiv 1604.06174) save memory where blocks are thin. Blocks of
# transformers have inputs that are small compared with their inner activations: checkpointing each block by itself
# needs less memory there.


class SegmentedForward(CheckpointedForward):
    """Replaces the `forward` of an nn.Sequential and keeps only the inputs of its segments."""

    def __init__(self, container: nn.Sequential) -> None:
        super().__init__(container, "full")
        children = list(container)  # a module that is listed twice runs twice
        size = math.ceil(math.sqrt(len(children)))
        self._segments = [children[start : start + size] for start in range(0, len(children), size)]
        self._known = [Knowledge(segment) for segment in self._segments]

    @override
    def __call__(self, value: Any) -> Any:
        """Run segment after segment."""
        if not torch.is_grad_enabled():
            return self.inner(value)
        for segment, knowledge in zip(self._segments, self._known, strict=True):
            value = self.run(partial(_run, segment), knowledge, value)
        return value


def apply_segments(module: nn.Module, groups: Sequence[BlockGroup]) -> AppliedCheckpointing:
    """Checkpoint the containers of some groups in segments of ceil(sqrt(n)) of their n children.

    Raises:
        ValueError: If a container is not a plain nn.Sequential: other code that calls the blocks can't be cut.
    """
    containers = [_container(module, group) for group in groups]
    for container in containers:
        refuse_checkpointed(container)
    forwards = [SegmentedForward(container) for container in containers]
    for wrapper in forwards:
        wrapper.block.forward = wrapper
    return AppliedCheckpointing(forwards)


def _container(module: nn.Module, group: BlockGroup) -> nn.Sequential:
    container = dict(module.named_modules()).get(group.container)
    if not isinstance(container, nn.Sequential) or type(container).forward is not nn.Sequential.forward:
        raise ValueError(
            f"`mode='sqrt'`: the blocks {group.names[0]!r} ... are called one by one by code of "
            f"{type(container).__name__}, not by a plain nn.Sequential, so that they cannot be joined into segments. "
            "Use mode='full', which for blocks with much inside needs less memory anyway."
        )
    return container


def _run(children: list[nn.Module], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
