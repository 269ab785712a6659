"""Tables of results for the terminal and as Markdown: predicted against measured, ours against the source's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_memfit.bench.record import Result
from lightning_memfit.memory import GIB, MIB, format_percent
from lightning_memfit.memory.kind import DeviceKind

_MB = 1_000_000


Cell = Callable[[Result, Result], str]
"""Returns the text of a cell for a row and the first row."""


def columns(results: Sequence[Result]) -> dict[str, Cell]:
    """Return the columns for which these results have figures, by heading."""
    unit, name = (GIB, "GiB") if max(map(_bytes, results), default=0) >= GIB else (MIB, "MiB")
    nvml: dict[str, Cell] = {"used MB (NVML)": lambda row, first: _size(_comparable(row) or None, _MB, 0)}
    source: dict[str, Cell] = {
        "source: samples/s": lambda row, first: _number(row.reference.get("samples_per_second"), 2),
        "source: MB": lambda row, first: _number(row.reference.get("memory_mb"), 0),
        "source: speed x first": _ratio(lambda row: row.reference.get("samples_per_second")),
        "source: memory x first": _ratio(lambda row: row.reference.get("memory_mb")),
    }
    return {
        "setting": lambda row, first: row.title,
        "samples/s": lambda row, first: _number(_samples(row), 2),
        "step s (5 % to 95 %)": _step,
        f"measured {name}": lambda row, first: _size(_bytes(row) or None, unit),
        f"predicted {name}": lambda row, first: _size(_predicted(row), unit),
        "error": lambda row, first: "" if row.prediction_error is None else format_percent(row.prediction_error),
        **(nvml if any(DeviceKind.of(row.device).has_own_memory for row in results) else {}),
        "speed x first": _ratio(_samples),
        "memory x first": _ratio(_comparable),
        "loss": _loss,
        **(source if any(row.reference for row in results) else {}),
    }


def markdown(results: Sequence[Result]) -> str:
    """Return Markdown: a table, and remarks on figures and noise."""
    return f"{rows_table(results)}\n" + "".join(f"- {line}\n" for line in remarks(results))


def rows_table(results: Sequence[Result], without: Sequence[str] = ()) -> str:
    """Return a Markdown table with a line for each row, without the columns whose headings begin with these words."""
    shown = {heading: cell for heading, cell in columns(results).items() if not heading.startswith(tuple(without))}
    rows = [list(shown), *([cell(row, results[0]) or "-" for cell in shown.values()] for row in results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * (len(shown) - 1) + "|", *lines[1:]]) + "\n"


def print_table(results: Sequence[Result], title: str) -> None:
    """Print the table on stdout without the source's columns; lines are not cut to the terminal's width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = {heading: cell for heading, cell in columns(results).items() if not heading.startswith("source")}
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(shown):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in results:
        table.add_row(*(cell(row, results[0]) for cell in shown.values()))
    console = Console(highlight=False, soft_wrap=True, width=max(240, Console().width))
    console.print(table)
    for line in remarks(results):
        console.print(f"- {line}", markup=False)


def remarks(results: Sequence[Result]) -> list[str]:
    """Return sentences on where the figures come from and how noisy they are."""
    where = sorted({_hardware(row) for row in results})
    commits = sorted({row.commit[:12] + row.commit[40:] for row in results if row.commit})
    named = ("python", "lightning_memfit", "torch", "lightning")
    versions = sorted({", ".join(f"{name} {row.versions.get(name)}" for name in named) for row in results})
    lines = [f"Measured on {'; '.join([*where, *versions])}; commit {', '.join(commits) or 'unknown'}."]
    spreads = [spread for row in results if (spread := _spread(row)) is not None]
    if spreads:
        steps = sorted({row.speed.timed_steps for row in results if row.speed})
        lines.append(
            f"Speeds are medians of {_range(steps)} optimizer steps, data loading included; differences below "
            f"{_range([round(100 * s) for s in sorted(spreads)])} % are noise."
        )
    busy = [row for row in results if row.speed is not None and not row.had_cores]
    if busy:
        whose = "All rows were" if len(busy) == len(results) else f"{len(busy)} of {len(results)} rows were"
        titles = f": {', '.join(row.title for row in busy)}" if len(busy) < min(4, len(results)) else ""
        lines.append(
            f"{whose} timed while other programs kept the cores busy, so that their speeds say little{titles}."
        )
    if any(DeviceKind.of(row.device).is_host for row in results):
        lines.append(
            "On the CPU, measured are the live tensors that operators make, and those of bitsandbytes' CPU optimizers."
        )
    notes = sorted({str(row.hardware["notes"]) for row in results if row.hardware.get("notes")})
    lines += [f"Note of who measured: {note}" for note in notes]
    said: dict[str, list[str]] = {}
    for row in results:
        if row.error is not None:
            said.setdefault(f"{row.error.type}: {row.error.message[:200]}", []).append(row.title)
        elif row.no_prediction:
            said.setdefault(f"no prediction, for {row.no_prediction[:200]}", []).append(row.title)
    return [*lines, *(f"{'; '.join(titles)}: {words}" for words, titles in said.items())]


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


def _ratio(figure: Callable[[Result], float | None]) -> Cell:
    """Return a cell with a row's figure over that of the first row."""

    def cell(row: Result, first: Result) -> str:
        value, of_first = figure(row), figure(first)
        return f"{value / of_first:.2f}" if value and of_first else ""

    return cell
