"""Run a block so that `torch.utils.checkpoint` recomputes it in backward, at the cost of torch's own checkpoint.

What the block was seen to write is put back around its recomputation. What that is, its first call finds out
(`check.FirstCall`); later calls look at nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_memfit.checkpointing.policies import selective_contexts
from lightning_memfit.memory.state import Group, State, groups_of

Function = Callable[..., Any]
Around = Callable[[], AbstractContextManager[Any]] | None
"""Makes the context in which a block's inputs are saved."""

_CPU = torch.device("cpu")


def in_trace() -> bool:
    """Whether tensors are fake, as in a trace: they have no values."""
    return torch._guards.detect_fake_mode(()) is not None


class Knowledge:
    """What the first calls of a block have shown, by which later ones are run. A copy begins without any.

    Attributes:
        settled: Training modes in which it has been called.
        traced: The same of calls in a trace, whose tensors have no values.
        written: Groups of its state that a call writes, which are put back around a recomputation.
        moves_generators: Whether a call draws from Python's or NumPy's global generator.
        devices: The CPU, and the accelerators that the block and its positional arguments lie on.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.settled: set[bool] = set()
        self.traced: set[bool] = set()
        self.written: tuple[Group, ...] = ()
        self.moves_generators = False
        self.devices: tuple[torch.device, ...] = (_CPU,)
        self._markers: tuple[Tensor, ...] = ()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Knowledge, (self.block,)

    @property
    def name(self) -> str:
        """What errors call the block."""
        return type(self.block).__name__

    def is_new(self) -> bool:
        """Whether the next call is the first in this training mode."""
        mode = self.block.training
        return mode not in self.settled and not (mode in self.traced and in_trace())

    def run(
        self, function: Function, kept: frozenset[Any], args: tuple[Any, ...], kwargs: dict[str, Any], around: Around
    ) -> Any:
        """Run the block's forward so that it is recomputed in backward, as all calls but the first.

        Args:
            function: What to run.
            kept: Operators whose outputs are kept.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            around: Makes the context in which inputs are saved.
        """
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
        if around is None and not self._markers:
            return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        called = _ByPosition(function, len(self._markers), tuple(kwargs))
        with (around or nullcontext)():
            return checkpoint(called, *self._markers, *args, *kwargs.values(), use_reentrant=False, **options)

    # --- what the first call looks at ---

    def groups(self) -> tuple[Group, ...]:
        """The block's state; without weights that DeepSpeed gives and takes while it runs."""
        is_gathered = any(hasattr(parameter, "ds_id") for parameter in self.block.parameters())
        return tuple(one for one in groups_of((self.block,)) if not (is_gathered and one.kind == "parameters"))

    def look_at_devices(self, inputs: Sequence[Tensor]) -> None:
        """Note the devices whose random states matter.

        Args:
            inputs: Those among positional arguments, of whose devices `checkpoint` keeps the random states by itself.
        """
        held = (*self.block.parameters(), *self.block.buffers(), *inputs)
        devices = {tensor.device for tensor in held if tensor.device.type not in ("cpu", "meta")}
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
