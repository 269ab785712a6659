"""`Ladder`: what is done, step by step, when not even one sample fits, and taken back when it is no longer needed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from lightning_memfit.fitting.agreement import Agreement
from lightning_memfit.fitting.patience import Patience


class Rung(ABC):
    """One way to make a sample need less memory and more time, put into effect in the middle of training.

    Gradients, random numbers and updates stay bitwise what they are.

    Attributes:
        name: For checkpoints.
    """

    name: str

    @property
    @abstractmethod
    def description(self) -> str:
        """What it did, in words that follow "with"."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Why it can do nothing now, or None where it can."""

    @abstractmethod
    def apply(self) -> None:
        """Do it; only where `refusal` is None."""

    @abstractmethod
    def remove(self) -> None:
        """Take it back. Safe to call at any time."""


class Ladder:
    """Rungs in the order they are tried, which all ranks climb together.

    After a quiet spell the rung taken last is given up, for whatever made it necessary may have passed: another
    process, an exceptionally long batch. What doing without it needs can't be measured beforehand, so it is tried; a
    failure within the next quiet spell takes the rung again, and doubles the spell. The batch that fails is repeated
    exactly.

    Args:
        rungs: What there is.
        agreement: Between the ranks. A rung is taken if it helps on any of them.
    """

    def __init__(self, rungs: Iterable[Rung], agreement: Agreement) -> None:
        self._left = list(rungs)
        self._agreement = agreement
        self._taken: list[Rung] = []
        self._patience = Patience()
        self._is_trying_without = False

    @property
    def names(self) -> list[str]:
        """Rungs taken, for `climb_to`."""
        return [rung.name for rung in self._taken]

    def climb(self) -> str | None:
        """Take the next rung that helps and tell what it did; None where none is left."""
        self._patience.restart()
        return next((rung.description for rung in list(self._left) if self._take(rung)), None)

    def climb_again(self) -> str | None:
        """After a failure: take the rung again that was given up lately; None where there is none."""
        if not self._is_trying_without:
            self._patience.restart()
            return None
        self._patience.fail()
        self._is_trying_without = False
        return next((rung.description for rung in self._left[:1] if self._take(rung)), None)

    def climb_to(self, names: Sequence[str]) -> str | None:
        """Take the rungs that a run before had taken, as far as they help here, and tell what they did."""
        taken = [rung.description for rung in list(self._left) if rung.name in names and self._take(rung)]
        return " and ".join(taken) or None

    def succeed(self) -> str | None:
        """Count a batch without failure; where it is time, give the rung up that was taken last, and tell which."""
        if not (self._taken or self._is_trying_without) or not self._patience.succeed():
            return None
        self._is_trying_without = bool(self._taken)
        if not self._taken:
            return None
        rung = self._taken.pop()
        description = rung.description
        rung.remove()
        self._left.insert(0, rung)
        return description

    def summary(self) -> str:
        """What was done and why no more could be, for the error when even that was not enough."""
        done = "".join(f" with {rung.description}," for rung in self._taken)
        not_done = "".join(f" No {rung.name}: {rung.refusal()}." for rung in self._left)
        return f"{f' even{done[:-1]}' if done else ''}.{not_done}"

    def close(self) -> None:
        """Take everything back, the latest first."""
        while self._taken:
            self._taken.pop().remove()

    def _take(self, rung: Rung) -> bool:
        helps = rung.refusal() is None
        if not self._agreement.any_of([helps])[0]:
            return False
        if helps:
            rung.apply()
        self._left.remove(rung)
        self._taken.append(rung)
        return True
