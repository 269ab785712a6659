"""`Lockstep`: ranks that communicate inside forward and backward stop together when one of them fails.

FSDP2 gathers the weights of a block before it computes and reduces its gradients afterwards. A rank that runs out of
memory in between leaves the others waiting. Two things prevent that:

- An action that is risky, or whose communication isn't known yet, is watched: before every collective all ranks agree
  that none has failed, by one small all-reduce on the CPU. If one has, all stop there.
- Any other action isn't: its collectives are only noted. A rank that fails in it does what is left of them, which it
  knows from the last time, with gradients of zero. The others finish what will be thrown away, and hear of the failure
  when they have.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.upstream.torch import FORGETS_PASSES, ShardedUnit, forget_pass, sharded_units
from lightning_memfit.memory.collectives import listen
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.memory.replicas import ranks_together
from lightning_memfit.reliability.consensus import (
    Apart,
    Astray,
    At,
    OfModule,
    PeerFailed,
    RankConsensus,
    divide_weights,
)
from lightning_memfit.reliability.upstream.deepspeed import shards_weights

T = TypeVar("T")

TRAINING = "training_step"
"""Name of actions that begin with all weights divided."""


def consensus_for(trainer: Trainer, is_evaluation: bool = False) -> RankConsensus:
    """Return what the ranks of a run agree by, once the strategy has set the module up; all ranks call this together.

    Args:
        trainer: The trainer.
        is_evaluation: Whether it is for evaluation alone, in which ranks agree only if they communicate in each batch.
    """
    strategy, world_size = trainer.strategy, trainer.world_size
    if isinstance(strategy, DeepSpeedStrategy):
        if is_evaluation and not shards_weights(trainer):
            return RankConsensus(1)
        return Unrepeatable(trainer.lightning_module, 1 if is_evaluation else world_size)
    if world_size == 1:
        is_sharded = any(isinstance(child, FSDPModule) for child in trainer.lightning_module.modules())
        return Alone(trainer.lightning_module, 1) if is_sharded else RankConsensus(1)
    num_together = _ranks_together(strategy)
    if sharded_units(trainer.lightning_module) and num_together in (1, ranks_together(trainer)):
        return Lockstep(trainer.lightning_module, world_size, has_others=num_together > 1)
    world_size = 1 if is_evaluation else world_size
    is_replicated = isinstance(strategy, DDPStrategy)
    return RankConsensus(world_size) if is_replicated else Apart(trainer.lightning_module, world_size)


def _ranks_together(strategy: Strategy) -> int:
    """Ranks that compute one model together, and communicate as they do so."""
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    return int(strategy.device_mesh["tensor_parallel"].size())


class Alone(OfModule):
    """What a single rank does under FSDP2, which computes with other tensors than those whose gradients are stepped."""

    @override
    def together(
        self, action: Callable[[], T], key: Hashable = None, is_risky: bool = True
    ) -> tuple[T | None, Exception | None]:
        """Do it; a pass that fails is forgotten, and what it has gathered divided.

        Args:
            action: What to do.
            key: Not used.
            is_risky: Not used.
        """
        result, failure = super().together(action, key, is_risky)
        if failure is not None:
            if not FORGETS_PASSES:
                raise failure
            if is_out_of_memory(failure):
                release(failure)
            forget_pass(self._module)
            divide_weights(self._module)
        return result, failure


_KNOWN_TO_FIT = (
    "Memory ran out on this rank in a step that had fitted before. With tensor parallelism a step is repeated only "
    "while its size or shape is new; in any other the ranks don't ask each other before they communicate. Resume from "
    "the last checkpoint with a smaller `MicroBatching(micro_batch_size=...)`, or leave more memory free: "
    "`limit_bytes=...`. {}"
)


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

        Args:
            action: What to do.
            key: Not used.
            is_risky: Not used.

        Raises:
            torch.OutOfMemoryError: If memory ran out.
        """
        result, failure = super().together(action, key, is_risky)
        if isinstance(failure, MemoryExhausted):
            raise failure
        if failure is not None:
            raise MemoryExhausted(f"{_BROKEN_OFF} {str(failure).splitlines()[0]}") from failure
        return result, None


class _Stopped(PeerFailed):
    """Raised before a collective that another rank doesn't come to."""


class Lockstep(OfModule):
    """A consensus of ranks that shard a module with FSDP2.

    Args:
        module: The module in training, sharded.
        world_size: Number of ranks. All of them must construct this together.
        has_others: Whether the module itself communicates as well, and announces it. Its collectives are as large as
            the batch, so that they can't be done for the others' sake: a rank that fails where none is watched ends
            the run.

    Attributes:
        is_watched: Whether ranks agree before each collective.
        trace: Numbers of the collectives since the last action has ended.
    """

    meets_inside = stops_together = True

    def __init__(self, module: nn.Module, world_size: int, has_others: bool = False) -> None:
        super().__init__(module, world_size)
        self._has_others = has_others
        self._unlisten = listen(self._meet)
        self._units = sharded_units(module)
        self._collectives = [
            collective
            for index, unit in enumerate(self._units)
            for collective in (_Gather(self, 2 * index, unit), _Reduce(self, 2 * index + 1, unit))
        ]
        self._known: dict[Hashable, list[int]] = {}
        self._last: str | None = None
        self.is_watched = False
        self.trace: list[int] = []
        for collective in self._collectives:
            collective.install()

    @override
    def close(self) -> None:
        """Give FSDP2 its collectives back, and destroy the group."""
        for collective in self._collectives:
            collective.uninstall()
        self._collectives = []
        self._unlisten()
        super().close()

    @override
    def settle(self) -> None:
        """Divide weights that evaluation has left gathered: all training steps then communicate alike."""
        if self._last != TRAINING or self.trace:
            super().settle()
            self._last = TRAINING
            self.trace.clear()

    @override
    def start_anew(self) -> None:
        """Forget how actions communicate, and divide what is gathered: a rank that has failed holds less of it."""
        self._known.clear()
        self._last = None
        self.settle()

    @override
    def knows(self, key: Any) -> bool:
        """Whether this rank knows how training with this key communicates."""
        return key in self._known

    @override
    def together(
        self, action: Callable[[], T], key: Any = None, is_risky: bool = True
    ) -> tuple[T | None, Exception | None]:
        """Do what all ranks do at this point, and stop on all of them if it fails on one.

        Args:
            action: What to do.
            key: A tuple, of which the first item is the name of what is done, that tells apart actions whose
                communication differs; None if it is not known beforehand.
            is_risky: Whether the action may well fail, or any rank doesn't know its key; the same on all ranks.

        Raises:
            Astray: If another rank has come to a different place of the run.
        """
        key = self._begin(key, is_risky)
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
            if self.is_watched:
                self._follow()
        except Exception as error:
            failure = error
        if failure is None:
            self._learn(key)
            return result, None
        chain = list(error_chain(failure))
        if any(isinstance(one, Astray) for one in chain):
            self.is_watched = False
            raise failure
        is_told = any(isinstance(one, _Stopped) for one in chain)
        if is_told or is_out_of_memory(failure):
            release(failure)
        try:
            forget_pass(self._module)
            if not is_told:
                self._tell_others(key)
        except Exception as error:  # they can't be told: they have failed as well, or wait elsewhere
            if self._has_others and is_out_of_memory(failure):
                raise MemoryExhausted(_KNOWN_TO_FIT.format(str(failure).splitlines()[0])) from failure
            raise failure from error
        finally:
            self.is_watched, self._last = False, None
            self.trace.clear()
        return None, None if is_told else failure

    # --- before and after an action ---------------------------------------------------------------------------------

    def _begin(self, key: Any, is_risky: bool) -> Hashable:
        """Decide whether to watch an action, alike on all ranks; return what to remember its collectives by."""
        if key is not None and key[0] == TRAINING:
            self.settle()
        elif key is not None:  # evaluation leaves some weights gathered for the next batch
            key = (*key, *(index for index, unit in enumerate(self._units) if unit.is_gathered))
        self.trace.clear()
        for collective in self._collectives:
            collective.begin()
        self._last = None if key is None else key[0]
        self.is_watched = is_risky or key not in self._known
        return key  # type: ignore[no-any-return]

    def _learn(self, key: Hashable) -> None:
        self.is_watched = False
        if key is None or self._known.get(key) == self.trace:
            self.trace.clear()
        else:
            self._known[key], self.trace = self.trace, []

    def _follow(self) -> None:
        """Take part in what other ranks still communicate, until all have finished."""
        while number := self._agree(0):
            self._play(number - 1)

    def _tell_others(self, key: Hashable) -> None:
        if self.is_watched:
            self._agree(0, has_failed=True)
            return
        if self._has_others:
            raise RuntimeError("What is left to communicate depends on the batch.")
        known, done = self._known[key], len(self.trace)
        if known[:done] != self.trace:
            raise RuntimeError(f"What is left to communicate isn't known: {known} last time, {self.trace} so far.")
        for number in known[done:]:
            self._play(number)

    def _play(self, number: int) -> None:
        """Take part in a collective for the others' sake."""
        before, self.is_watched = self.is_watched, False
        try:
            self._collectives[number].play()
        finally:
            self.is_watched = before

    def _meet(self) -> None:
        """Agree before a collective of the module's own."""
        if self.is_watched:
            self.agree(len(self._collectives))

    # --- agreement --------------------------------------------------------------------------------------------------

    @override
    def highest(self, number: int) -> int:
        """Return the highest number of all ranks.

        Raises:
            PeerFailed: If one has failed and won't come.
        """
        return self._agree(number)

    def agree(self, number: int) -> None:
        """Wait until all ranks are before this collective.

        Raises:
            PeerFailed: If one has failed and won't come.
        """
        self._agree(number + 1)

    def _agree(self, number: int, has_failed: bool = False) -> int:
        told = self.exchange(has_failed, number, at=At.INSIDE)
        if any(failed for failed, _ in told) and not has_failed:
            raise _Stopped("Another rank has failed.")
        return int(max(number for _, number in told))


# --- collectives ----------------------------------------------------------------------------------------------------


class _Gather:
    """Gathers the weights of a unit, in the place of what FSDP2 did so with."""

    def __init__(self, lockstep: Lockstep, number: int, unit: ShardedUnit) -> None:
        self._lockstep, self._number, self._unit = lockstep, number, unit
        self._inner = unit.all_gather
        self.allocate = self._inner.allocate

    def install(self) -> None:
        self._unit.module.set_custom_all_gather(self)

    def uninstall(self) -> None:
        self._unit.module.set_custom_all_gather(self._inner)

    def begin(self) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lockstep = self._lockstep
        if lockstep.is_watched:
            lockstep.agree(self._number)
        work = self._inner(*args, **kwargs)
        lockstep.trace.append(self._number)
        return work

    def play(self) -> None:
        """Gather with this rank's own part of the weights: what others compute with them is in order."""
        self._unit.module.unshard()
        self._unit.module.reshard()


class _Reduction(NamedTuple):
    """What a reduction was called with."""

    input_elements: int
    output_elements: int
    dtype: torch.dtype
    device: torch.device
    options: dict[str, Any]


class _Reduce:
    """Reduces the gradients of a unit, in the place of what FSDP2 did so with.

    Where parameters are not divided, but copies of the model are summed over, FSDP2 only asks for two buffers, and then
    sums. Ranks agree when it asks for the second one.
    """

    def __init__(self, lockstep: Lockstep, number: int, unit: ShardedUnit) -> None:
        self._lockstep, self._number, self._unit = lockstep, number, unit
        self._inner = unit.reduce_scatter
        self._is_second = False
        self._last: _Reduction | None = None

    def install(self) -> None:
        self._unit.module.set_custom_reduce_scatter(self)

    def uninstall(self) -> None:
        self._unit.module.set_custom_reduce_scatter(self._inner)

    def begin(self) -> None:
        self._is_second = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer: Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        if self._unit.num_shards == 1:
            if self._is_second:
                if self._lockstep.is_watched:
                    self._lockstep.agree(self._number)
                self._last = _Reduction(0, buffer.numel(), dtype, device, {})
                self._lockstep.trace.append(self._number)
            self._is_second = not self._is_second
        return buffer

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        lockstep = self._lockstep
        if lockstep.is_watched:
            lockstep.agree(self._number)
        work = self._inner(output_tensor=output_tensor, input_tensor=input_tensor, **options)
        lockstep.trace.append(self._number)
        if lockstep.is_watched or self._last is None:
            sizes = (input_tensor.numel(), output_tensor.numel())
            self._last = _Reduction(*sizes, output_tensor.dtype, output_tensor.device, options)
        return work

    def play(self) -> None:
        """Reduce zeros."""
        last, copies = self._last, self._unit.copies
        assert last is not None, "a collective that nobody has done yet"
        output = torch.zeros(last.output_elements, dtype=last.dtype, device=last.device)
        if last.input_elements:
            zeros = torch.zeros(last.input_elements, dtype=last.dtype, device=last.device)
            self._inner(output_tensor=output, input_tensor=zeros, **last.options)
        if copies is not None:
            distributed.all_reduce(output, group=copies)
        self._lockstep.trace.append(self._number)
