"""`Lockstep`: ranks that communicate inside forward and backward stop together when one of them fails.

FSDP2 gathers the weights of a block before it computes and reduces its gradients afterwards. A rank that runs out of
memory in between leaves the others waiting. So an action that may well fail is watched: before every collective all
ranks agree that none has failed, by one small all-gather on the CPU. If one has, all stop there. Steps whose size and
shapes have fitted before aren't watched: a rank that fails in one of them ends the run, and a `RankWatch` the others.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_memfit.fitting.recovery.retry import MemoryExhausted, ShortElsewhere
from lightning_memfit.fitting.upstream.torch import FORGETS_PASSES, forget_pass
from lightning_memfit.memory.collectives import listen
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.memory.replicas import ranks_together
from lightning_memfit.reliability.consensus import (
    TRAINING,
    Astray,
    At,
    PeerFailed,
    RankConsensus,
    divide_weights,
)
from lightning_memfit.reliability.upstream.deepspeed import shards_weights

T = TypeVar("T")

_COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_reduce")
"""Functions of `torch.distributed` that FSDP2 communicates by, from torch 2.13 on."""
_MAX_KNOWN = 4096
_PATIENCE = timedelta(seconds=30)
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


class Apart(RankConsensus):
    """A consensus of ranks that communicate inside an action but can't be stopped together.

    A rank that runs out of memory waits for the others for a short time only: if they have run out of memory as well,
    they come, and if not, they never will. Under ZeRO, whose engine doesn't forget a step that was broken off, nothing
    is repeated: a shortage ends the run, and a `RankWatch` tells the other ranks.
    """

    meets_inside = True

    def __init__(self, world_size: int, module: nn.Module, can_repeat: bool = True) -> None:
        super().__init__(world_size, module)
        self.can_repeat = can_repeat

    @override
    def highest(self, number: int) -> int:
        """Return the highest number of all ranks.

        Raises:
            ShortElsewhere: If another rank doesn't come, having run out of memory.
        """
        told = self.exchange(0, number)
        if any(status for status, _ in told):
            raise ShortElsewhere("Memory ran out on another rank.")
        return int(max(theirs for _, theirs in told))

    @override
    def together(
        self, action: Callable[[], T], key: Hashable = None, is_risky: bool = True
    ) -> tuple[T | None, Exception | None]:
        """Do what all ranks do at this point; an error that nothing can be done about is raised."""
        try:
            return action(), None
        except Exception as error:
            if isinstance(error, MemoryExhausted) or not is_out_of_memory(error):
                raise
            failure = error
        if not self.can_repeat:
            raise MemoryExhausted(f"{_BROKEN_OFF} {str(failure).splitlines()[0]}") from failure
        self._patience = _PATIENCE
        return None, failure


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
        layers: dict[str, Any] = {
            name: partial(watched, number, getattr(distributed, name))
            for number, name in enumerate(_COLLECTIVES, start=1)
        }
        try:
            with patch.multiple(distributed, **layers):
                yield
        finally:
            unlisten()

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


def consensus_for(trainer: Trainer, is_evaluation: bool = False) -> RankConsensus:
    """Return what the ranks of a run agree by, once the strategy has set the module up; all ranks call this together.

    Args:
        trainer: The trainer.
        is_evaluation: Whether it is for evaluation alone, in which ranks agree only if they communicate in each batch.
    """
    strategy, module, world_size = trainer.strategy, trainer.lightning_module, trainer.world_size
    if isinstance(strategy, DeepSpeedStrategy):
        if is_evaluation and not shards_weights(trainer):
            return RankConsensus(1)
        return Apart(1 if is_evaluation else world_size, module, can_repeat=False)
    is_plain = world_size == 1 or isinstance(strategy, DDPStrategy)
    if any(isinstance(child, FSDPModule) for child in module.modules()):
        if world_size == 1:
            return Alone(1, module)
        together = 1  # ranks that compute one model
        if isinstance(strategy, ModelParallelStrategy):
            together = int(strategy.device_mesh["tensor_parallel"].size())
        if FORGETS_PASSES and together in (1, ranks_together(trainer)):
            return Lockstep(world_size, module)
    world_size = 1 if is_evaluation else world_size
    return RankConsensus(world_size) if is_plain else Apart(world_size, module)
