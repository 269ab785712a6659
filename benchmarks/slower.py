"""What a page of `memfit bench` says at its top: which rows are slower than what they are compared with, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import notes
from benchmarks.peers.peer import PEERS
from benchmarks.side_by_side import grouped
from lightning_memfit.bench.record import Result

LEAST = 0.9
"""Share of the speed that a row is compared with, below which it needs a reason."""


@dataclass(frozen=True)
class Slower:
    """A row that is slower than what it is compared with."""

    result: Result
    times: float
    """Its speed over that one's."""
    than: str
    """What it is compared with, in words."""
    is_busy: bool
    """Whether one of the two didn't have the cores for itself."""

    @property
    def figures(self) -> str:
        """The row and its figures."""
        busy = ", busy" if self.is_busy else ""
        return f"{self.result.group or self.result.title}: {self.times:.2f}x of {self.than}{busy}"

    @property
    def reason(self) -> str:
        """Why it is slower."""
        return notes.reason(self.result.experiment, self.result.row, self.result)


def slower(results: Sequence[Result]) -> list[Slower]:
    """Rows below `LEAST`: beside the fastest other tool of a group, or the source's ratio, or the first row."""
    found = [*_beside_tools(results), *_beside_the_first(results)]
    return [one for one in found if one.times < LEAST]


def paragraph(results: Sequence[Result], title: str) -> str:
    """Markdown: faults of the commits at which rows were measured, then the rows that are slower, by reason.

    A row is busy if it or what it is compared with was timed while other programs kept the cores busy.
    """
    if not any(map(_speed, results)):
        return ""
    by_reason: dict[str, list[str]] = {}
    for one in slower(results):
        by_reason.setdefault(one.reason, []).append(one.figures)
    lines = notes.faults({result.commit for result in results})
    lines += [f"{'; '.join(figures)}. {reason}" for reason, figures in by_reason.items()]
    listed = "".join(f"- {line}\n" for line in lines)
    return f"\n**{title}: below {LEAST}x of the speed that a row is compared with**\n\n{listed}" if lines else ""


def _beside_tools(results: Sequence[Result]) -> Iterator[Slower]:
    for row in grouped(results).values():
        ours = row.get("")
        others = [result for peer, result in row.items() if peer and _speed(result)]
        if ours is None or not _speed(ours) or not others:
            continue
        fastest = max(others, key=_speed)
        busy = not (ours.had_cores and fastest.had_cores)
        yield Slower(ours, _speed(ours) / _speed(fastest), PEERS[fastest.peer], busy)


def _beside_the_first(results: Sequence[Result]) -> Iterator[Slower]:
    first = results[0]
    for result in results[1:]:
        if result.group or not _speed(result) or not _speed(first):
            continue
        times, given = _speed(result) / _speed(first), _given(result) / _given(first) if _given(first) else 0.0
        than = "the first row"
        if given:
            than = "the source's ratio"
            times /= given
        yield Slower(result, times, than, not (result.had_cores and first.had_cores))


def _speed(result: Result) -> float:
    return (result.speed.samples_per_second or 0.0) if result.speed and result.status == "ok" else 0.0


def _given(result: Result) -> float:
    return result.reference.get("samples_per_second", 0.0)
