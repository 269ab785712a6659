"""Rows that several tools train, one column per tool: who needs less memory, who is faster, by how much."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.peer import PEERS
from lightning_memfit.bench.record import Result
from lightning_memfit.memory import GIB, MIB
from lightning_memfit.memory.kind import DeviceKind

_TOOLS = {"": "lightning-memfit", **PEERS}
_MEMORY_TOLERANCE, _HOST_TOLERANCE = 0.01, 0.1  # live tensors are the same in every run, resident memory isn't

Groups = dict[str, dict[str, Result]]
"""Results by group, then by tool."""

_REMARKS = (
    "Every row runs in a process of its own, on the same batches from the same weights. Peers are measured with this "
    "package's own clock and ledger; nothing is predicted for them. busy: other programs kept the cores busy. A dash: "
    "there is no such row. The experiment says what each tool is told beside model, data, batch, steps and precision.",
    "Resident memory is followed from before the model is built to the last step, and is good to some tens of MiB.",
    "n/a: on the CPU nothing tells tensors that a peer keeps in host memory from those on a device; resident memory "
    "holds both. What this package keeps on the host is left out of its live tensors.",
    "torchao's compiled steps run unfollowed: its states are counted, what a step holds for a moment isn't.",
)


@dataclass(frozen=True)
class _Measure:
    """One figure of the comparison."""

    title: str
    value: Callable[[Result], float | None]
    digits: int = 1
    needs_cores: bool = False
    """Whether the figure says nothing of a row that didn't have the cores for itself."""


def grouped(results: Sequence[Result]) -> Groups:
    """The rows that belong to a group, in their order."""
    groups: Groups = {}
    for result in results:
        if result.group:
            groups.setdefault(result.group, {})[result.peer] = result
    return groups


def side_by_side(results: Sequence[Result]) -> str:
    """Markdown: all figures of each group and tool, and where a peer is better."""
    groups = grouped(results)
    tools = [tool for tool in _TOOLS if any(tool in row for row in groups.values())]
    measures = _measures(groups)
    lines = [
        f"In each cell: {' / '.join(measure.title for measure in measures)}.",
        "",
        f"| | {' | '.join(_TOOLS[tool] for tool in tools)} |",
        "|---" + "|---:" * len(tools) + "|",
    ]
    for group, row in groups.items():
        lines.append(f"| {group} | {' | '.join(_cell(measures, row.get(tool)) for tool in tools)} |")
    lines += ["", "**Where another tool is better**", "", *(f"- {line}" for line in better_peers(results))]
    return "\n".join(lines) + "\n"


def remarks_on(table: str) -> list[str]:
    """What explains the figures of a table of `side_by_side`."""
    said = {"n/a:": "n/a", "torchao's": "torchao"}
    return [line for line in _REMARKS if said.get(line.split()[0], "|") in table]


def better_peers(results: Sequence[Result]) -> list[str]:
    """A sentence for each group in which a peer beats this package by more than a figure's noise."""
    found = {group: list(_better(row)) for group, row in grouped(results).items()}
    return [f"{group}: {'; '.join(words)}." for group, words in found.items() if words] or ["Nowhere, beyond noise."]


def _better(row: dict[str, Result]) -> Iterator[str]:
    ours = row.get("")
    for peer, theirs in row.items():
        if ours is None or not peer or theirs.status != "ok":
            continue
        words = []
        for what, value, tolerance in (
            ("live tensors", _live, _MEMORY_TOLERANCE),
            ("resident memory", _resident, _HOST_TOLERANCE),
        ):
            mine, other = value(ours), value(theirs)
            if mine and other and other < mine * (1 - tolerance):
                words.append(f"{1 - other / mine:.0%} less {what}")
        if ours.had_cores and theirs.had_cores and _is_faster(theirs, ours):
            words.append(f"{(_speed(theirs) or 0) / (_speed(ours) or 1):.2f} times as fast")
        if words:
            yield f"{_TOOLS[peer]} ({', '.join(words)})"


def _measures(groups: Groups) -> list[_Measure]:
    rows = [result for row in groups.values() for result in row.values()]
    is_large = max((_live(row) or 0 for row in rows), default=0) >= GIB
    unit, name, digits = (GIB, "GiB", 2) if is_large else (MIB, "MiB", 1)
    counted = any(DeviceKind.of(row.device).has_caching_allocator for row in rows)
    live = "`torch.cuda.max_memory_allocated`" if counted else "peak of live tensors"
    return [
        _Measure(f"{live}, {name}", lambda row: _in(unit, _live(row)), digits),
        _Measure(f"added resident memory, {name}", lambda row: _in(unit, _resident(row)), digits),
        _Measure("samples a second", _speed, 2, needs_cores=True),
        _Measure("loss of the last step", lambda row: row.loss_last, 3),
    ]


def _cell(measures: Sequence[_Measure], result: Result | None) -> str:
    if result is None:
        return "-"
    if result.status != "ok":
        return result.status.replace("_", " ")
    return " / ".join(_figure(measure, result) for measure in measures)


def _figure(measure: _Measure, result: Result) -> str:
    if measure.needs_cores and not result.had_cores:
        return "busy"
    value = measure.value(result)
    return "n/a" if value is None else f"{value:,.{measure.digits}f}"


def _is_faster(one: Result, other: Result) -> bool:
    """Whether the slow steps of one take less than the fast ones of the other."""
    return bool(one.speed and other.speed and one.speed.step_seconds_q95 < other.speed.step_seconds_q05)


def _speed(row: Result) -> float | None:
    return row.speed.samples_per_second if row.speed else None


def _live(row: Result) -> int | None:
    return row.measured.allocated_bytes if row.measured and row.status == "ok" else None


def _resident(row: Result) -> int | None:
    return row.measured.rss_growth_bytes if row.measured and row.status == "ok" else None


def _in(unit: int, value: int | None) -> float | None:
    return None if value is None else value / unit
