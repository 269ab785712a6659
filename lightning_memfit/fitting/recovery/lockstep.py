"""`Lockstep`: ranks that communicate inside forward and backward stop together when one of them fails.

FSDP2 gathers the weights of a block before it computes and reduces its gradients afterwards. A rank that runs out of
memory in between leaves the others waiting. So an action that may well fail is watched: before every collective all
ranks agree that none has failed, by one small all-gather on the CPU. If one has, all stop there. Steps whose size and
shapes have fitted before aren't watched: a rank that fails in one of them ends the run, and a `RankWatch` the others.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch import distributed, nn
from typing_extensions import override

from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.upstream.torch import FORGETS_PASSES, forget_pass
from lightning_memfit.memory.collectives import listen
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.reliability.consensus import (
    TRAINING,
    Apart,
    Astray,
    At,
    PeerFailed,
    RankConsensus,
    divide_weights,
)

T = TypeVar("T")

_COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_reduce")
"""Functions of `torch.distributed` that FSDP2 communicates by, from torch 2.13 on."""
_MAX_KNOWN = 4096
_OWN, _DONE = len(_COLLECTIVES) + 1, 0
"""What a rank is about to do, beside these: a collective of the module's own, or nothing more."""


class Alone(RankConsensus):
    """What a single rank does under FSDP2, which computes with other tensors than those whose gradients are stepped."""

    _module: nn.Module

    @override
    def together(
        self, action: Callable[[], T], key: Hashable = None, is_risky: bool = True
    ) -> tuple[T | None, Exception | None]:
        """Do it; a pass that fails is forgotten, and what it has gathered divided."""
        result, failure = super().together(action, key, is_risky)
        if failure is not None:
            if not FORGETS_PASSES:
                raise failure
            if is_out_of_memory(failure):
                release(failure)
            forget_pass(self._module)
            divide_weights(self._module)
        return result, failure


_BROKEN_OFF = (
    "Memory ran out in a step under ZeRO, which can't be repeated. Resume from the last checkpoint with a smaller "
    "`MicroBatching(micro_batch_size=...)`, or for evaluation with a smaller batch size of its loader."
)


class Unrepeatable(Apart):
    """A consensus of ranks under ZeRO, whose engine doesn't forget a step that was broken off: a shortage ends the run.

    Nobody waits for the other ranks then: a `RankWatch` tells them.
    """

    can_repeat = False

    @override
    def together(
        self, action: Callable[[], T], key: Hashable = None, is_risky: bool = True
    ) -> tuple[T | None, Exception | None]:
        """Do what all ranks do at this point; every error is raised.

        Raises:
            torch.OutOfMemoryError: If memory ran out.
        """
        result, failure = super().together(action, key, is_risky)
        if isinstance(failure, MemoryExhausted):
            raise failure
        if failure is not None:
            raise MemoryExhausted(f"{_BROKEN_OFF} {str(failure).splitlines()[0]}") from failure
        return result, None


_KNOWN_TO_FIT = (
    "Memory ran out on rank {} in `{}`, with a size and shapes that had fitted before. Ranks that divide weights "
    "repeat a step while its size or shapes are new; later they don't ask each other before they communicate. Resume "
    "from the last checkpoint with a smaller `MicroBatching(micro_batch_size=...)`, or for evaluation with a smaller "
    "batch size of its loader. {}"
)
_DIFFERENTLY = (
    "The ranks communicate differently in one step, and would wait for each other without end. Let the loaders of all "
    "ranks deliver batches of equally many samples (`drop_last=True`), and let no rank leave out a layer."
)


class _Stopped(PeerFailed):
    """Raised before a collective that another rank doesn't come to."""


class Lockstep(RankConsensus):
    """A consensus of ranks that shard a module with FSDP2."""

    meets_inside = stops_together = True

    _module: nn.Module

    def __init__(self, world_size: int, module: nn.Module) -> None:
        super().__init__(world_size, module)
        self._known: set[Any] = set()
        self._last: Hashable = None

    @override
    def settle(self) -> None:
        """Divide weights that evaluation has left gathered: all training steps then communicate alike."""
        if self._last != TRAINING:
            super().settle()
            self._last = TRAINING

    @override
    def start_anew(self) -> None:
        """Watch everything again."""
        self._known.clear()

    @override
    def knows(self, key: Hashable) -> bool:
        """Whether an action with this key has been watched and has ended well."""
        return key in self._known

    @override
    def together(
        self, action: Callable[[], T], key: Any = None, is_risky: bool = True
    ) -> tuple[T | None, Exception | None]:
        """Do what all ranks do at this point, and stop on all of them if it fails on one while it is watched.

        The key is a tuple of the name of what is done and what else may make it need other memory.

        Raises:
            MemoryExhausted: If memory runs out in an action that isn't watched.
            Astray: If another rank has come to a different place of the run.
        """
        name = None if key is None else key[0]
        if name == TRAINING:
            self.settle()
        self._last = name
        is_watched = is_risky or key not in self._known
        result: T | None = None
        try:
            with self._watched() if is_watched else nullcontext():
                result = action()
                if is_watched:
                    self._agree(_DONE)
        except Exception as error:
            failure = error
        else:
            if key is not None:
                if len(self._known) >= _MAX_KNOWN:  # a step whose key is forgotten is watched by all ranks again
                    self._known = {known for known in self._known if known[0] != TRAINING}
                self._known.add(key)
            return result, None
        is_told = any(isinstance(one, _Stopped) for one in error_chain(failure))
        is_short = is_out_of_memory(failure)
        if not is_watched and is_short:
            where = distributed.get_rank(), name, str(failure).splitlines()[0]
            raise MemoryExhausted(_KNOWN_TO_FIT.format(*where)) from failure
        if not is_watched or any(isinstance(one, Astray) for one in error_chain(failure)):
            raise failure
        if is_told or is_short:
            release(failure)
        try:
            forget_pass(self._module)
            divide_weights(self._module)  # a rank that has failed holds less of them
            if not is_told:
                self.exchange(True, _DONE, at=At.INSIDE)
        except Exception as error:  # the others can't be told: they have failed as well, or wait elsewhere
            raise failure from error
        finally:
            self._last = None
        return None, None if is_told else failure

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Agree before each collective."""

        def watched(number: int, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._agree(number)
            return collective(*args, **kwargs)

        unlisten = listen(partial(self._agree, _OWN))
        before = {name: getattr(distributed, name) for name in _COLLECTIVES}
        for number, (name, collective) in enumerate(before.items(), start=1):
            setattr(distributed, name, partial(watched, number, collective))
        try:
            yield
        finally:
            unlisten()
            for name, collective in before.items():
                setattr(distributed, name, collective)

    def _agree(self, number: int) -> None:
        """Wait until all ranks are before the same collective."""
        if len({theirs for _, theirs in self._told(number)}) > 1:
            raise Astray(_DIFFERENTLY)

    @override
    def highest(self, number: int) -> int:
        """Return the highest number of all ranks.

        Raises:
            PeerFailed: If one has failed and won't come.
        """
        return int(max(theirs for _, theirs in self._told(number)))

    def _told(self, number: int) -> list[Any]:
        told: list[Any] = self.exchange(False, number, at=At.INSIDE)
        if any(failed for failed, _ in told):
            raise _Stopped("Another rank has failed.")
        return told
