"""`RankConsensus`: ranks exchange a few numbers, so that all of them fit, fail and recover in the same way."""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed


class RankConsensus:
    """Exchange a few numbers between all ranks, on the CPU and separate from the training's own communication.

    A single rank needs no group, and an exchange costs it nothing. With several, an exchange is one all-gather over a
    separate gloo group: it neither waits for the accelerator nor interferes with collectives that run there.

    Args:
        world_size: Number of ranks. With more than one, all of them must construct this together.
        timeout: How long an exchange waits for the slowest rank before it raises.
    """

    def __init__(self, world_size: int, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.world_size = world_size
        self._group = distributed.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None

    def exchange(self, *numbers: float) -> list[Sequence[float]]:
        """Send some numbers to all ranks and return those of every rank, in the order of ranks.

        Args:
            numbers: Numbers of this rank, as many as on every other. Integers up to 2^53 stay exact.
        """
        if self._group is None:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.float64)
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        distributed.all_gather(theirs, mine, group=self._group)
        return [one.tolist() for one in theirs]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        if self._group is None:
            return list(flags)
        tensor: Tensor = torch.tensor(flags, dtype=torch.uint8)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in tensor.tolist()]

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None
