"""`MicroBatchSize`: the size in use, lowered after a failure and raised again when a `Backoff` has passed."""

from dataclasses import dataclass
from itertools import chain

STEPS_BEFORE_GROWTH = 100
_LONGEST = 100 * STEPS_BEFORE_GROWTH


class Backoff:
    """Decides how long to wait before something that needs more memory is tried again.

    It counts steps without failure; each failure that comes soon doubles how many are needed. A try costs at most one
    repeated batch, so with doubling the cost of failed tries is soon negligible.
    """

    def __init__(self) -> None:
        self._num_steps = STEPS_BEFORE_GROWTH
        self._num_quiet = 0

    def fail(self) -> None:
        """Restart the count; if the last try failed before the wait was over, wait twice as long."""
        if self._num_quiet < self._num_steps:
            self._num_steps = min(2 * self._num_steps, _LONGEST)
        self._num_quiet = 0

    def restart(self) -> None:
        """Restart the count after a failure that was not caused by a try."""
        self._num_quiet = 0

    def succeed(self) -> bool:
        """Count a step without failure, and return whether it is time for a try."""
        self._num_quiet += 1
        is_time = self._num_quiet >= self._num_steps
        if is_time:
            self._num_quiet = 0
        return is_time


def prefer(local_batch_size: int, largest: int) -> int:
    """Return the best micro-batch size up to `largest` for a device's batch.

    Of the sizes that need no more micro-batches than `largest` does, those that divide the batch come first (all
    micro-batches equal), then multiples of 8 (tensor cores), then `largest` itself. The number of micro-batches
    stays the same.

    Raises:
        ValueError: If `largest` is below 1.
    """
    if largest < 1:
        raise ValueError(f"`largest={largest}` must be at least 1.")
    largest = min(largest, local_batch_size)
    fewest = -(-local_batch_size // -(-local_batch_size // largest))
    candidates = range(largest, fewest - 1, -1)
    dividing = (size for size in candidates if local_batch_size % size == 0)
    eights = (size for size in candidates if size % 8 == 0)
    return next(chain(dividing, eights), largest)


@dataclass
class MicroBatchSize:
    """The size in use: lowered after a failure, and raised again after some time without failure.

    Args:
        local_batch_size: Samples per device and loader batch.
        target: The size wanted, at which growth ends.

    Attributes:
        current: The size in use.
    """

    local_batch_size: int
    target: int

    def __post_init__(self) -> None:
        self.current = self.target
        self._backoff = Backoff()

    def shrink(self, failed: int) -> int:
        """Lower the size after one failed, by a quarter at least, and wait twice as long before growing again.

        Returns:
            The new size, or 0 if there is none below `failed`.
        """
        if failed <= 1:
            return 0
        self.current = min(self.current, prefer(self.local_batch_size, max(1, failed * 3 // 4)))
        self._backoff.fail()
        return self.current

    def succeed(self) -> int:
        """Count a step without failure.

        Returns:
            The size for the next step.
        """
        if self.current >= self.target:
            return self.current
        if self._backoff.succeed():
            fewer = -(-self.local_batch_size // self.current) - 1
            saves_one = -(-self.local_batch_size // fewer) if fewer else self.local_batch_size
            self.current = prefer(self.local_batch_size, min(self.target, max(saves_one, self.current * 4 // 3)))
        return self.current
