"""How long to wait before trying again what needs more memory."""

STEPS_BEFORE_GROWTH = 100
_LONGEST = 100 * STEPS_BEFORE_GROWTH


class Patience:
    """Counts steps without failure; each failure that comes soon doubles how many it takes.

    A try costs at most one repeated batch, so that with doubling the cost of tries that fail is soon negligible.
    """

    def __init__(self) -> None:
        self._num_steps = STEPS_BEFORE_GROWTH
        self._num_quiet = 0

    def fail(self) -> None:
        """Begin anew; where the last try is not yet known to be good, wait twice as long."""
        if self._num_quiet < self._num_steps:
            self._num_steps = min(2 * self._num_steps, _LONGEST)
        self._num_quiet = 0

    def restart(self) -> None:
        """Begin anew after a failure that no try has brought about."""
        self._num_quiet = 0

    def succeed(self) -> bool:
        """Count a step without failure and tell whether it is time for a try."""
        self._num_quiet += 1
        is_time = self._num_quiet >= self._num_steps
        if is_time:
            self._num_quiet = 0
        return is_time
