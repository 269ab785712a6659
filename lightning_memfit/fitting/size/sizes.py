"""`MicroBatchSize`: the size in use, lowered after a failure."""

from collections.abc import Callable
from itertools import chain


def prefer(local_batch_size: int, largest: int) -> int:
    """Return the best micro-batch size up to `largest` for a device's batch.

    Of the sizes that need no more micro-batches than `largest` does, those that divide the batch come first (all
    micro-batches equal), then multiples of 8 (tensor cores), then `largest` itself.
    """
    largest = min(largest, local_batch_size)
    fewest = -(-local_batch_size // -(-local_batch_size // largest))
    candidates = range(largest, fewest - 1, -1)
    dividing = (size for size in candidates if local_batch_size % size == 0)
    eights = (size for size in candidates if size % 8 == 0)
    return next(chain(dividing, eights), largest)


class MicroBatchSize:
    """The size in use (`current`) for batches of so many samples, which is lowered after a failure."""

    def __init__(self, local_batch_size: int, size: int = 1) -> None:
        self.local_batch_size = local_batch_size
        self.name_smaller: Callable[[int], int] | None = None  # what follows one that failed, while a search goes on
        self.begin(size, size)

    def begin(self, size: int, at_most: int) -> None:
        """Begin with a size, and with another one for larger batches while nothing has failed."""
        self.current = size
        self._at_most = at_most

    def for_batch(self, num_samples: int) -> int:
        """Return the size for a batch, which may have more samples than the first one had."""
        return min(num_samples, self._at_most if self.current >= self.local_batch_size else self.current)

    def shrink(self, failed: int) -> int:
        """Lower the size after one failed, by a quarter at least.

        Returns:
            The new size, or 0 if there is none below `failed`.
        """
        if failed <= 1:
            return 0
        if self.name_smaller is not None:
            self.current = min(self.current, self.name_smaller(failed))
        else:
            self.current = min(self.current, prefer(self.local_batch_size, max(1, failed * 3 // 4)))
        self._at_most = self.current
        return self.current
