"""`RankConsensus`: ranks exchange a few numbers, so that all of them fit, fail and recover in the same way."""

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")

TRAINING = "training_step"
"""Name of actions that begin with all weights divided."""

_TIMEOUT = timedelta(minutes=30)  # of an exchange with the slowest rank
_MOST_NUMBERS = 4
_ASTRAY = (
    "The ranks have come to different places of the run: {}. They would wait for each other without end. Let all of "
    "them train and validate on equally many batches (`Trainer(limit_train_batches=...)` takes as many as the rank "
    "with the fewest has), and end an epoch or the run together: `trainer.should_stop` and what "
    "`on_train_batch_start` returns must be the same on all ranks."
)
_UNEVEN = (
    "Rank {} has no more batches after batch {}, while rank {} has: the ranks would wait for each other without end. "
    "Let the loaders of all ranks deliver equally many batches: `Trainer({}={})` leaves out what only some of them "
    "have; to use it, divide the samples evenly (rank r of an `IterableDataset` takes every `world_size`-th one from r "
    "on)."
)


class At(Enum):
    """Places of a run at which ranks exchange numbers, so that ranks that have parted notice."""

    ELSEWHERE = "is in a comparison before training goes on"
    BATCH = "begins a training batch"
    INSIDE = "is within a step"
    ATTEMPTED = "has run forward and backward of a batch"
    REDUCTION = "is about to reduce gradients"
    EVALUATED = "has run an evaluation step"
    EPOCH_END = "has ended its training epoch"


_PLACES = tuple(At)


class PeerFailed(RuntimeError):
    """Another rank has failed, which is why this one stops."""


class Astray(PeerFailed):
    """The ranks are at different places of the run, and none of them can go on."""


def require_as_many_batches(is_last: Sequence[float], number: int, option: str) -> None:
    """Refuse a batch that is the last one on some ranks and not on others, before they part, on all ranks alike.

    Args:
        is_last: For each rank, whether this batch is its last one.
        number: Number of this batch, counted from 1.
        option: The Trainer's argument that limits the number of batches.

    Raises:
        MisconfigurationException: If it is so.
    """
    if len(set(map(bool, is_last))) > 1:
        ended = [bool(one) for one in is_last]
        raise MisconfigurationException(_UNEVEN.format(ended.index(True), number, ended.index(False), option, number))


def divide_weights(module: nn.Module) -> None:
    """Divide the weights of a module that FSDP2 has left gathered."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


class RankConsensus:
    """Exchange a few numbers between all ranks, on the CPU and separate from the training's own communication.

    A single rank needs no group, and an exchange costs it nothing. With several, an exchange is one all-gather over a
    separate gloo group: it neither waits for the accelerator nor interferes with collectives that run there.

    Args:
        world_size: Number of ranks. With more than one, all of them must construct this together.
        module: A module whose weights may be divided.

    Attributes:
        meets_inside: Whether ranks communicate inside the actions that are done together.
        stops_together: Whether such an action ends on all of them if it fails on one.
        can_repeat: Whether a training step in which memory ran out can be repeated.
    """

    meets_inside = False
    stops_together = False
    can_repeat = True

    def __init__(self, world_size: int, module: nn.Module | None = None) -> None:
        self.world_size = world_size
        self._module = module
        self._group = distributed.new_group(backend="gloo", timeout=_TIMEOUT) if world_size > 1 else None
        self._patience = _TIMEOUT

    def settle(self) -> None:
        """Put the module in the state in which a training step begins, and in which copies of its weights are valid."""
        if self._module is not None:
            divide_weights(self._module)  # that evaluation has left gathered

    def start_anew(self) -> None:
        """Forget how actions communicate, which has changed; on all ranks together."""

    def knows(self, key: Hashable) -> bool:
        """Whether this rank knows how an action with this key communicates."""
        return True

    def together(
        self, action: Callable[[], T], key: Hashable = None, is_risky: bool = True
    ) -> tuple[T | None, Exception | None]:
        """Do what all ranks do at this point.

        Args:
            action: What to do.
            key: What tells actions apart whose communication may differ; None if it is not known beforehand.
            is_risky: Whether the action may well fail, or any rank doesn't know its key; the same on all ranks.

        Returns:
            Its result and None, or None and the error it ended in. Two times None if it was ended because it has failed
            on another rank, which will say so.
        """
        try:
            return action(), None
        except Exception as error:
            return None, error

    def exchange(self, *numbers: float, at: At = At.ELSEWHERE) -> list[Sequence[float]]:
        """Send some numbers to all ranks and return those of every rank, in the order of ranks.

        Args:
            numbers: Up to four numbers of this rank, as many as on every other. Integers up to 2^53 stay exact.
            at: The place of the run that this rank has come to. Messages of all places have one size, so that ranks at
                different ones get each other's.

        Raises:
            Astray: On all ranks, if they have come to different places.
        """
        if self._group is None:
            return [numbers]
        mine = torch.zeros(1 + _MOST_NUMBERS, dtype=torch.float64, device="cpu")
        here = _PLACES.index(at)
        mine[: 1 + len(numbers)] = torch.tensor((here, *numbers), dtype=torch.float64, device="cpu")
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = distributed.all_gather(theirs, mine, group=self._group, async_op=True)
        assert work is not None
        work.wait(self._patience)
        told = [one.tolist() for one in theirs]
        if any(place != here for place, *_ in told):
            places = (f"rank {rank} {_PLACES[int(place)].value}" for rank, (place, *_) in enumerate(told))
            raise Astray(_ASTRAY.format(", ".join(places)))
        return [one[1 : 1 + len(numbers)] for one in told]

    def highest(self, number: int) -> int:
        """Return the highest number of all ranks, inside an action in which they communicate."""
        return number

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        if self._group is None:
            return list(flags)
        tensor: Tensor = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in tensor.tolist()]

    def from_rank(self, rank: int, value: T) -> T:
        """Return what one rank passes here, on all of them; anything that can be pickled."""
        if self._group is None:
            return value
        values: list[Any] = [value]
        distributed.broadcast_object_list(values, src=rank, group=self._group)
        return values[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None
