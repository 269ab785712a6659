"""Tables of results for the terminal and as Markdown: predicted against measured, ours against the source's.

Rows that several tools train are compared first, with one column per tool, and a sentence names each figure in which
another tool is better than this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_memfit.bench.peers.peer import PEERS
from lightning_memfit.bench.record import Result
from lightning_memfit.memory import GIB, MIB, format_percent
from lightning_memfit.memory.kind import DeviceKind

# --- groups of rows side by side: one line per group, one column per tool ---------------------------------------------


_TOOLS = {"": "lightning-memfit", **PEERS}
_MEMORY_TOLERANCE, _HOST_TOLERANCE = 0.01, 0.1  # live tensors are the same in every run, resident memory isn't

Groups = dict[str, dict[str, Result]]
"""Results by group, then by tool."""


@dataclass(frozen=True)
class _Measure:
    """One figure of the comparison, which gets a table of its own."""

    title: str
    value: Callable[[Result], float | None]
    digits: int = 1
    is_valid: Callable[[Result], bool] = lambda row: True
    """Whether a row's figure is meaningful; if not, the cell shows `busy`."""


def side_by_side(results: Sequence[Result]) -> str:
    """Return Markdown: a table for each measure, where a peer is better, and the options that each peer was given."""
    groups = grouped(results)
    tools = [tool for tool in _TOOLS if any(tool in row for row in groups.values())]
    parts = [_table(measure, groups, tools) for measure in _measures(groups)]
    if any(row.status == "ok" and not row.had_cores for row in results):
        parts.append("busy: other programs kept the cores busy, so that the row's speed says nothing.\n")
    parts.append("**Where another tool is better**\n\n" + "".join(f"- {line}\n" for line in better_peers(results)))
    parts.append("**What the tools were told** beside model, data, batch, steps and precision\n\n" + _told(groups))
    return "\n".join(parts)


def grouped(results: Sequence[Result]) -> Groups:
    """Return the rows that belong to a group, in their order."""
    groups: Groups = {}
    for result in results:
        if result.group:
            groups.setdefault(result.group, {})[result.peer] = result
    return groups


def better_peers(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each figure in which a peer beats this package by more than the figure's noise."""
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
    counted = any(DeviceKind.of(row.device).has_caching_allocator for row in rows)
    live = "`torch.cuda.max_memory_allocated`" if counted else "Peak of live tensors"
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


# --- the table of an experiment ---------------------------------------------------------------------------------------


_MB = 1_000_000

_PEER_REMARKS = (
    "Every row runs in a process of its own, one after the other, on the same batches from the same weights. Peers are "
    "measured with this package's own clock and ledger; nothing is predicted for them. A dash: there is no such row.",
    "Resident memory is followed from before the model is built to the last step, and is good to some tens of MiB.",
    "n/a: on the CPU nothing tells tensors that a peer keeps in host memory from those on a device; resident memory "
    "holds both. What this package keeps on the host is left out of its live tensors.",
    "torchao's compiled steps run unfollowed: its states are counted, what a step holds for a moment isn't; programs "
    "that compile stay in resident memory.",
)


@dataclass(frozen=True)
class Column:
    """One column: its heading, and a function from a row and the first row to the cell's text."""

    heading: str
    cell: Callable[[Result, Result], str]


def columns(results: Sequence[Result]) -> list[Column]:
    """Return the columns for which these results have figures."""
    unit, name = (GIB, "GiB") if max(map(_bytes, results), default=0) >= GIB else (MIB, "MiB")
    shown = [
        Column("setting", lambda row, first: row.title),
        Column("samples/s", lambda row, first: _number(_samples(row), 2)),
        Column("step s (5 % to 95 %)", _step),
        Column(f"measured {name}", lambda row, first: _size(_bytes(row) or None, unit)),
        Column(f"predicted {name}", lambda row, first: _size(_predicted(row), unit)),
        Column("error", lambda row, first: percent(row.prediction_error)),
        Column("speed x first", lambda row, first: _ratio(_samples(row), _samples(first))),
        Column("memory x first", lambda row, first: _ratio(_comparable(row), _comparable(first))),
        Column("loss", _loss),
    ]
    if any(DeviceKind.of(row.device).has_own_memory for row in results):
        shown.insert(6, Column("used MB (NVML)", lambda row, first: _size(_comparable(row) or None, _MB, 0)))
    if any(row.reference for row in results):
        shown += [
            Column("source: samples/s", lambda row, first: _number(_given(row, "samples_per_second"), 2)),
            Column("source: MB", lambda row, first: _number(_given(row, "memory_mb"), 0)),
            Column("source: speed x first", _reference_ratio("samples_per_second")),
            Column("source: memory x first", _reference_ratio("memory_mb")),
        ]
    return shown


def markdown(results: Sequence[Result]) -> str:
    """Return Markdown: groups side by side if there are any, then a table and remarks on figures and noise."""
    shown = columns(results)
    lines = [side_by_side(results), "**All rows**", ""] if any(row.group for row in results) else []
    lines += [
        "| " + " | ".join(column.heading for column in shown) + " |",
        "|---" + "|---:" * (len(shown) - 1) + "|",
    ]
    lines += ["| " + " | ".join(column.cell(row, results[0]) or "-" for column in shown) + " |" for row in results]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks(results))]) + "\n"


def print_table(results: Sequence[Result], title: str) -> None:
    """Print the table on stdout without the source's columns; lines are not cut to the terminal's width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = [column for column in columns(results) if not column.heading.startswith("source")]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(shown):
        table.add_column(column.heading, justify="right" if index else "left", no_wrap=True)
    for row in results:
        table.add_row(*(column.cell(row, results[0]) for column in shown))
    console = Console(highlight=False, soft_wrap=True, width=max(240, Console().width))
    console.print(table)
    for line in remarks(results):
        console.print(f"- {line}", markup=False)


def remarks(results: Sequence[Result]) -> list[str]:
    """Return sentences on where the figures come from and how noisy they are."""
    where = sorted({_hardware(row) for row in results})
    lines = [f"Measured on {'; '.join(where)}."] if where else []
    commits = sorted({row.commit[:12] + row.commit[40:] for row in results if row.commit})
    versions = sorted({", ".join(f"{name} {value}" for name, value in row.versions.items()) for row in results})
    lines.append(f"{'; '.join(versions)}; commit {', '.join(commits) or 'unknown'}.")
    spreads = [spread for row in results if (spread := _spread(row)) is not None]
    if spreads:
        steps = sorted({row.speed.timed_steps for row in results if row.speed})
        lines.append(
            f"Speeds are medians of {_range(steps)} optimizer steps, data loading included. Half of the range from the "
            f"5 % to the 95 % quantile is {_range([round(100 * s) for s in sorted(spreads)])} % of the median: smaller "
            "differences between rows are noise."
        )
    busy = [row for row in results if row.speed is not None and not row.had_cores]
    if busy:
        whose = "All rows were" if len(busy) == len(results) else f"{len(busy)} of {len(results)} rows were"
        titles = "" if len(busy) == len(results) else f": {', '.join(row.title for row in busy)}"
        lines.append(
            f"{whose} timed while other programs kept the cores busy, so that their speeds say little{titles}. Memory "
            "and losses don't depend on that."
        )
    if any(DeviceKind.of(row.device).is_host for row in results):
        lines.append(
            "On the CPU, measured are the live tensors that operators make, those inside bitsandbytes' CPU optimizers "
            "included."
        )
    if any(row.group for row in results):
        lines += _PEER_REMARKS
    notes = sorted({str(row.hardware["notes"]) for row in results if row.hardware.get("notes")})
    lines += [f"Note of who measured: {note}" for note in notes]
    for row in results:
        if row.error is not None:
            lines.append(f"{row.title}: {row.error.type}: {row.error.message[:200]}")
        elif row.no_prediction:
            lines.append(f"{row.title}: no prediction, for {row.no_prediction[:200]}")
    return lines


# --- cells ------------------------------------------------------------------------------------------------------------


def _step(row: Result, first: Result) -> str:
    if row.status != "ok":
        return row.status.replace("_", " ")
    if row.speed is None:
        return ""
    speed = row.speed
    return f"{speed.step_seconds_median:.3g} ({speed.step_seconds_q05:.3g} to {speed.step_seconds_q95:.3g})"


def _loss(row: Result, first: Result) -> str:
    if row.loss_first is None or row.loss_last is None:
        return ""
    return f"{row.loss_first:.3f} to {row.loss_last:.3f}"


def _reference_ratio(name: str) -> Callable[[Result, Result], str]:
    return lambda row, first: _ratio(_given(row, name), _given(first, name))


def _given(row: Result, name: str) -> float | None:
    return row.reference.get(name)


def _samples(row: Result) -> float | None:
    return row.speed.samples_per_second if row.speed else None


def _bytes(row: Result) -> int:
    return (row.measured.allocated_bytes if row.measured and row.status == "ok" else None) or 0


def _comparable(row: Result) -> int:
    """Return what sources state: card memory of the process, or else of everyone; on the CPU live tensors."""
    measured = row.measured
    if measured is None or row.status != "ok":
        return 0
    return measured.process_bytes or measured.card_bytes or measured.allocated_bytes or 0


def _predicted(row: Result) -> int | None:
    return row.predicted.allocated_bytes if row.predicted else None


def _spread(row: Result) -> float | None:
    if row.speed is None or row.status != "ok":
        return None
    return (row.speed.step_seconds_q95 - row.speed.step_seconds_q05) / 2 / row.speed.step_seconds_median


def _hardware(row: Result) -> str:
    hardware = row.hardware
    device = hardware.get("device", row.device)
    threads = f", {hardware['threads']} used" if "threads" in hardware else ""
    return f"{device}, {hardware.get('cores')} {hardware.get('machine')} cores{threads}"


def _range(values: list[int]) -> str:
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _size(value: int | None, unit: int, digits: int = 1) -> str:
    return "" if value is None else f"{value / unit:,.{digits if unit != GIB else 2}f}"


def percent(value: float | None) -> str:
    """Return a share in percent with its sign; empty for None."""
    return "" if value is None else format_percent(value)


def _ratio(value: float | None, first: float | None) -> str:
    return f"{value / first:.2f}" if value and first else ""
