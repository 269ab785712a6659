"""Groups of rows side by side: what is compared down, the tools across; and where another tool is better than ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_memfit.bench.peers.registry import PEERS
from lightning_memfit.bench.record import Result
from lightning_memfit.memory import GIB, MIB

_TOOLS = {"": "lightning-memfit", **PEERS}
_MEMORY_TOLERANCE, _HOST_TOLERANCE = 0.01, 0.1  # live tensors repeat to the byte, resident memory doesn't

Groups = dict[str, dict[str, Result]]
"""Result by tool by group."""


@dataclass(frozen=True)
class _Measure:
    """One table."""

    title: str
    value: Callable[[Result], float | None]
    digits: int = 1
    is_valid: Callable[[Result], bool] = lambda row: True
    """Whether a row's figure says anything; `busy` stands in its place otherwise."""


def side_by_side(results: Sequence[Result]) -> str:
    """One table a measure as Markdown, then where a peer is better, then what each peer was told."""
    groups = grouped(results)
    tools = [tool for tool in _TOOLS if any(tool in row for row in groups.values())]
    parts = [_table(measure, groups, tools) for measure in _measures(groups)]
    if any(row.status == "ok" and not row.had_cores for row in results):
        parts.append("busy: other programs kept the cores busy, so that the row's speed says nothing.\n")
    parts.append("**Where another tool is better**\n\n" + "".join(f"- {line}\n" for line in better_peers(results)))
    parts.append("**What the tools were told** beside model, data, batch, steps and precision\n\n" + _told(groups))
    return "\n".join(parts)


def grouped(results: Sequence[Result]) -> Groups:
    """Rows that belong to a group, in their order."""
    groups: Groups = {}
    for result in results:
        if result.group:
            groups.setdefault(result.group, {})[result.peer] = result
    return groups


def better_peers(results: Sequence[Result]) -> list[str]:
    """One sentence for each figure in which a peer beats this package by more than the figure's noise."""
    return list(_better(grouped(results))) or ["Nowhere, beyond noise."]


def _better(groups: Groups) -> Iterator[str]:
    for group, row in groups.items():
        ours = row.get("")
        if ours is None:
            continue
        for peer, theirs in row.items():
            if not peer or theirs.status != "ok":
                continue
            where = f"{group}: {_TOOLS[peer]}"
            for what, value, tolerance in (
                ("memory of live tensors", _live, _MEMORY_TOLERANCE),
                ("added resident memory", _resident, _HOST_TOLERANCE),
            ):
                mine, other = value(ours), value(theirs)
                if mine and other and other < mine * (1 - tolerance):
                    yield f"{where} needs {1 - other / mine:.0%} less {what} than ours."
            if not (ours.had_cores and theirs.had_cores):
                continue
            if ours.speed and theirs.speed and theirs.speed.step_seconds_q95 < ours.speed.step_seconds_q05:
                ratio = ours.speed.step_seconds_median / theirs.speed.step_seconds_median
                yield f"{where} is {ratio:.2f} times as fast as ours: its slow steps take less than our fast ones."


def _measures(groups: Groups) -> list[_Measure]:
    rows = [result for row in groups.values() for result in row.values()]
    unit, name = (GIB, "GiB") if max((_live(row) or 0 for row in rows), default=0) >= GIB else (MIB, "MiB")
    on_cuda = any(row.device == "cuda" for row in rows)
    live = "`torch.cuda.max_memory_allocated`" if on_cuda else "Peak of live tensors"
    digits = 2 if unit == GIB else 1
    return [
        _Measure(f"{live}, {name}", lambda row: _in(unit, _live(row)), digits),
        _Measure(f"Added to the process's resident memory, {name}", lambda row: _in(unit, _resident(row)), digits),
        _Measure("Samples a second", _speed, 2, lambda row: row.had_cores),
        _Measure("Loss of the last step", lambda row: row.loss_last, 3),
    ]


def _table(measure: _Measure, groups: Groups, tools: Sequence[str]) -> str:
    lines = [
        f"**{measure.title}**",
        "",
        f"| | {' | '.join(_TOOLS[tool] for tool in tools)} |",
        "|---" + "|---:" * len(tools) + "|",
    ]
    for group, row in groups.items():
        lines.append(f"| {group} | {' | '.join(_cell(measure, row.get(tool)) for tool in tools)} |")
    return "\n".join(lines) + "\n"


def _cell(measure: _Measure, result: Result | None) -> str:
    if result is None:
        return "-"
    if result.status != "ok":
        return result.status.replace("_", " ")
    if not measure.is_valid(result):
        return "busy"
    value = measure.value(result)
    return "n/a" if value is None else f"{value:,.{measure.digits}f}"


def _told(groups: Groups) -> str:
    rows = [result for row in groups.values() for result in row.values() if result.peer]
    return "".join(f"- {row.title}: {_words(row.options)}\n" for row in rows)


def _words(options: dict[str, object]) -> str:
    if not options:
        return "nothing"
    return ", ".join(f"`{name}={value}`" for name, value in options.items())


def _speed(row: Result) -> float | None:
    return row.speed.samples_per_second if row.speed else None


def _live(row: Result) -> int | None:
    return row.measured.allocated_bytes if row.measured and row.status == "ok" else None


def _resident(row: Result) -> int | None:
    return row.measured.rss_growth_bytes if row.measured and row.status == "ok" else None


def _in(unit: int, value: int | None) -> float | None:
    return None if value is None else value / unit
