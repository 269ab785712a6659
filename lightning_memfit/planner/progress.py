"""`Progress`: what a search is doing, told to whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass
class Working:
    """How far a search is."""

    traced: str = ""
    """What is being traced, in a few words."""
    traces: int = 0
    """Traces begun, that one included."""
    left: int = 0
    """Combinations that may still be better."""
    best: str = ""
    """The best setting so far, with its time; empty if nothing fits yet."""
    checked: int = 0
    """Combinations that were worked out or ruled out."""

    def words(self) -> str:
        """All of it in one line."""
        parts = [f"tracing {self.traced} (trace {self.traces})"] if self.traced else []
        parts += [f"{self.left} combinations left"] if self.left else []
        found = "nothing fits so far" if self.checked else "none checked yet"
        return ", ".join([*parts, f"best so far: {self.best}" if self.best else found])


class Progress(Protocol):
    """Is told at every change, several times a second at most when traces are cached."""

    def __call__(self, working: Working) -> None:
        """Show it, or don't."""


def unseen(working: Working) -> None:
    """Show nothing."""
