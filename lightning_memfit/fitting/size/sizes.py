"""`MicroBatchSize`: the size in use, lowered after a failure and raised again when a `Backoff` has passed."""

from collections.abc import Callable
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


class MicroBatchSize:
    """The size in use: lowered after a failure, and raised again after some time without failure.

    What fails is one effective batch, however often its micro-batch has to be lowered until it passes: calls of
    `shrink` without a `succeed` between them are one failure. After a quiet spell the size wanted is tried at once,
    for most causes pass: a batch of very long samples, another process on the card. If that fails soon, the run is back
    at the size that was good, the spell is twice as long, and the next tries go halfway up to what failed, so that a
    permanent shortage costs few repeated batches and ends at the largest size that fits.

    Args:
        local_batch_size: Samples per device and loader batch.
        target: The size wanted, at which growth ends.
        at_most: The size for batches larger than `local_batch_size`, while nothing has failed; by default `target`.

    Attributes:
        current: The size in use.
        name_smaller: Names the size that follows one that failed, while a search goes on.
    """

    def __init__(self, local_batch_size: int, target: int, at_most: int | None = None) -> None:
        self.local_batch_size = local_batch_size
        self._at_most = max(target, target if at_most is None else at_most)
        self.target = target
        self.current = target
        self._good = target
        """The largest size known to last; below `current` while that is a try."""
        self._bad: int | None = None
        """The smallest size that failed when it was tried."""
        self._is_failing = False
        self._is_settled = True
        self._backoff = Backoff()
        self.name_smaller: Callable[[int], int] | None = None

    def begin(self, size: int, at_most: int) -> None:
        """Begin with a size, and with another one for larger batches."""
        self.target = self.current = self._good = size
        self._at_most = at_most

    def take(self, size: int) -> None:
        """Go on with a size that a search has named; if it fails, the one before it is taken again."""
        self.target = self.current = size
        self._good = min(self._good, size)

    def for_batch(self, num_samples: int) -> int:
        """Return the size for a batch, which may have more samples than the first one had."""
        is_whole = self._is_settled and self.current >= self.local_batch_size
        return min(num_samples, self._at_most if is_whole else self.current)

    def shrink(self, failed: int) -> int:
        """Lower the size after one failed: to the last good one if that was a try, else by a quarter at least.

        Returns:
            The new size, or 0 if there is none below `failed`.
        """
        if failed <= 1:
            return 0
        if self.name_smaller is not None:
            self.take(min(self.current, self.name_smaller(failed)))
            self._at_most = self.target
            return self.current
        if not self._is_failing:
            self._is_failing = True
            if self._good < self.current:
                self._backoff.fail()
                self._bad = self.current
            else:
                self._backoff.restart()
        self._at_most = self.target
        smaller = self._good if self._good < failed else prefer(self.local_batch_size, max(1, failed * 3 // 4))
        self.current = self._good = min(self.current, smaller)
        self._is_settled = False
        return self.current

    def succeed(self) -> int:
        """Count an effective batch without failure.

        Returns:
            The size for the next one.
        """
        if self._is_settled and self.current >= self.target:
            return self.current
        self._is_failing = False
        self._is_settled = False  # ranks lower `current` together, without a call of `shrink` on each
        self._good = min(self._good, self.current)
        if not self._backoff.succeed():
            return self.current
        self._good = self.current
        if self.current >= self.target:
            self._is_settled, self._bad, self._backoff = True, None, Backoff()
        else:
            self.current = self._next_try()
        return self.current

    def _next_try(self) -> int:
        """Return the size wanted, or if that failed lately one between it and the good one that saves a micro-batch."""
        fewer = -(-self.local_batch_size // self._good) - 1
        saves_one = -(-self.local_batch_size // fewer)
        if self._bad is None or saves_one >= self._bad:
            self._bad = None
            return self.target
        return prefer(self.local_batch_size, max(saves_one, (self._good + self._bad) // 2))
