"""`write_report`: what a sweep's records show, as a CSV file, pictures and an HTML page.

`draw` makes the pictures with matplotlib (the extra `plot`), `page` the HTML that embeds them.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memfit.bench.record import Result
from lightning_memfit.bench.scaling import Curve, Point, as_csv, curves_of, pareto_front, points_of, unit_of
from lightning_memfit.bench.table import percent, remarks
from lightning_memfit.estimate.page import render_page
from lightning_memfit.extras import require
from lightning_memfit.memory import GIB, MIB, format_bytes

# --- drawing: colours that colour-blind readers can tell apart --------------------------------------------------------


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008, without the yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "os^DvPX*"
_SOFT = "#5b5b5b"
_SIZE = (9.0, 4.6)
_SQUARE = (7.4, 4.6)  # a square and its legend
_LEGEND_LINE, _LEGEND_MARGIN = 0.2, 0.3  # inches
_DPI = 150
_BAND = 0.05
_DODGE = 0.03  # share of the distance between two numbers of processes


def draw(points: Sequence[Point], curves: Sequence[Curve], unit: str) -> dict[str, Figure]:
    """Draw every picture that the points allow, by name.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    require("matplotlib", "Drawing the report's pictures")
    figures = {}
    if curves:
        figures["speedup"] = _speedup(curves)
        figures["efficiency"] = _efficiency(curves)
    if any(point.predicted_bytes is not None for point in points):
        figures["memory"] = _memory(points)
    if points:
        figures["pareto"] = _pareto(points, unit)
    return figures


def as_svg(figure: Figure, name: str) -> str:
    """Return the picture as an `svg` element; equal pictures give equal text."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def write_png(figure: Figure, path: Path) -> None:
    """Write the picture."""
    # With equal axes a constrained layout leaves no room for their label at some resolutions.
    figure.savefig(path, format="png", dpi=_DPI, bbox_inches="tight", pad_inches=0.1, metadata={"Software": None})


# --- pictures ---------------------------------------------------------------------------------------------------------


def _axes(x: str, y: str, size: tuple[float, float] = _SIZE) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#d8d8d8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, axes: Axes, more: Sequence[Any] = ()) -> None:
    """Put a legend of any length next to the axes; the picture grows with it."""
    handles = [*axes.get_legend_handles_labels()[0], *more]
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, max(height, _LEGEND_MARGIN + _LEGEND_LINE * len(handles)))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)


def _speedup(curves: Sequence[Curve]) -> Figure:
    figure, axes = _axes("processes", "speed-up (times the speed of one process)")
    numbers = sorted({number for curve in curves for number in curve.devices})
    axes.plot(numbers, numbers, "--", color=_SOFT, label="ideal")
    for index, curve in enumerate(curves):
        below = [value - low for value, low in zip(curve.speedup, curve.speedup_low, strict=True)]
        above = [high - value for value, high in zip(curve.speedup, curve.speedup_high, strict=True)]
        axes.errorbar(
            _dodged(curve.devices, index, len(curves), numbers),
            curve.speedup,
            yerr=[[0.0, *below[1:]], [0.0, *above[1:]]],  # the first is 1 by definition
            label=curve.label,
            **_style(index),
        )
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def _efficiency(curves: Sequence[Curve]) -> Figure:
    figure, axes = _axes("processes", "efficiency (speed-up per process, %)")
    numbers = sorted({number for curve in curves for number in curve.devices})
    axes.axhline(100, linestyle="--", color=_SOFT, label="ideal")
    for index, curve in enumerate(curves):
        values = [100 * value for value in curve.efficiency]
        axes.plot(_dodged(curve.devices, index, len(curves), numbers), values, label=curve.label, **_line(index))
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def _memory(points: Sequence[Point]) -> Figure:
    known = [point for point in points if point.predicted_bytes is not None]
    unit, name = _unit(known)
    figure, axes = _axes(f"measured peak of a process ({name})", f"predicted peak ({name})", _SQUARE)
    top = 1.08 * max(max(point.measured_bytes, point.predicted_bytes or 0) for point in known) / unit
    axes.plot([0, top], [0, top], "--", color=_SOFT, label="prediction equals measurement")
    axes.fill_between(
        [0, top],
        [0, top * (1 - _BAND)],
        [0, top * (1 + _BAND)],
        color="#000000",
        alpha=0.08,
        linewidth=0,
        label=f"within {_BAND:.0%}",
    )
    for (technique, devices), group in _groups(known).items():
        axes.scatter(
            [point.measured_bytes / unit for point in group],
            [(point.predicted_bytes or 0) / unit for point in group],
            **_dot(known, technique, devices),
        )
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal", adjustable="box")
    axes.locator_params(nbins=6)
    _legend(figure, axes, _keys(known))
    return figure


def _pareto(points: Sequence[Point], unit: str) -> Figure:
    scale, name = _unit(points)
    figure, axes = _axes(f"measured peak of a process ({name})", f"{unit}/s of all processes")
    front = pareto_front(points)
    axes.plot(
        [point.measured_bytes / scale for point in front],
        [point.per_second for point in front],
        drawstyle="steps-post",
        color=_SOFT,
        linewidth=1.2,
        label="Pareto front",
        zorder=1,
    )
    for (technique, devices), group in _groups(points).items():
        axes.errorbar(
            [point.measured_bytes / scale for point in group],
            [point.per_second for point in group],
            yerr=[
                [point.per_second - point.per_second_low for point in group],
                [point.per_second_high - point.per_second for point in group],
            ],
            fmt="none",
            ecolor="#b0b0b0",
            elinewidth=1,
            zorder=2,
        )
        axes.scatter(
            [point.measured_bytes / scale for point in group],
            [point.per_second for point in group],
            **_dot(points, technique, devices),
        )
    axes.set_xlim(0, 1.08 * max(point.measured_bytes for point in points) / scale)
    axes.set_ylim(bottom=0)
    _legend(figure, axes, _keys(points))
    return figure


# --- style ------------------------------------------------------------------------------------------------------------


def _line(index: int) -> dict[str, Any]:
    marker = _MARKERS[index % len(_MARKERS)]
    style = ("-", "-.", ":")[index // len(COLOURS) % 3]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker, "linestyle": style, "linewidth": 1.5}


def _style(index: int) -> dict[str, Any]:
    return {**_line(index), "capsize": 3, "elinewidth": 1}


def _dot(points: Sequence[Point], technique: str, devices: int) -> dict[str, Any]:
    """Return a marker whose colour and fill show the technique, and whose shape shows the number of processes."""
    techniques, numbers = _techniques(points), _numbers(points)
    number = techniques.index(technique)
    colour, marker = COLOURS[number % len(COLOURS)], _MARKERS[numbers.index(devices) % len(_MARKERS)]
    is_filled = number // len(COLOURS) % 2 == 0
    edge = {"edgecolors": "white", "linewidths": 0.6} if is_filled else {"edgecolors": colour, "linewidths": 1.5}
    return {"facecolors": colour if is_filled else "white", "marker": marker, "s": 46, "zorder": 3, **edge}


def _keys(points: Sequence[Point]) -> list[Any]:
    """Return the legend's entries: one for each colour and each shape, not one for every pair."""
    from matplotlib.lines import Line2D

    def key(label: str, dot: dict[str, Any]) -> Line2D:
        style = {"markerfacecolor": dot["facecolors"], "markeredgecolor": dot["edgecolors"]}
        return Line2D([], [], linestyle="", marker=dot["marker"], markersize=7, label=label, **style)

    techniques, numbers = _techniques(points), _numbers(points)
    shown = []
    if any(techniques):
        shown += [key(name, _dot(points, name, numbers[0]) | {"marker": "o"}) for name in techniques]
    if len(numbers) > 1 or not shown:
        grey = {"facecolors": _SOFT, "edgecolors": "white"}
        for number in numbers:
            label = "1 process" if number == 1 else f"{number} processes"
            shown.append(key(label, {**_dot(points, techniques[0], number), **grey}))
    return shown


def _techniques(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.technique for point in points))


def _numbers(points: Sequence[Point]) -> list[int]:
    return sorted({point.devices for point in points})


def _groups(points: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.technique, point.devices), []).append(point)
    return groups


def _unit(points: Sequence[Point]) -> tuple[int, str]:
    return (GIB, "GiB") if max(point.measured_bytes for point in points) >= 2 * GIB else (MIB, "MiB")


def _dodged(devices: Sequence[int], index: int, count: int, numbers: Sequence[int]) -> list[float]:
    """Return positions next to each other, so that marks at the same number of processes don't overlap."""
    gap = min((b - a for a, b in pairwise(numbers)), default=1)
    return [number + (index - (count - 1) / 2) * _DODGE * gap for number in devices]


# --- the HTML page, which loads nothing -------------------------------------------------------------------------------


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { max-width: 980px; } h1 { font-size: 22px; } h2 { font-size: 17px; margin: 28px 0 4px; }
p, li { color: var(--soft); margin: 0 0 6px; } svg { max-width: 100%; height: auto; display: block; }
figure { margin: 0; background: #ffffff; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""

_CAPTIONS = {
    "speedup": (
        "Speed-up",
        "Speed of all processes against that of one, all else equal. Bars: 5 % to 95 % quantile of the step times.",
    ),
    "efficiency": ("Efficiency", "Speed-up divided by the number of processes."),
    "memory": (
        "Memory against prediction",
        "Peak of live tensors of the first process, and what was predicted before the run.",
    ),
    "pareto": (
        "Speed and memory",
        "No run beats one on the front in both. Bars: 5 % to 95 % quantile of the step times.",
    ),
}


def page(title: str, results: Sequence[Result], figures: Mapping[str, Figure], command: str) -> str:
    """Return the whole page.

    Args:
        title: The sweep's title.
        results: Results of all runs.
        figures: Pictures from `draw`.
        command: Command line that makes the page.
    """
    parts = [f"<p>{len(results)} runs. Made by <code>{html.escape(command)}</code>.</p>"]
    for name, figure in figures.items():
        heading, caption = _CAPTIONS[name]
        parts.append(
            f"<h2>{heading}</h2>\n<p>{html.escape(caption)}</p>\n"
            f'<figure role="img" aria-label="{heading}">{as_svg(figure, name)}</figure>'
        )
    parts.append(f'<h2>All runs</h2>\n<div class="wide">{runs_table(results)}</div>')
    parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in remarks(results)) + "</ul>")
    return render_page(title, "\n".join(parts), _STYLE)


def runs_table(results: Sequence[Result]) -> str:
    """Return an HTML table with the figures of every run."""
    unit = unit_of(results)
    front = {point.row for point in pareto_front(points_of(results))}
    headings = ("run", f"{unit}/s", "step s (5 % to 95 %)", "measured", "predicted", "error", "Pareto front")
    lines = ["<table><tr>" + "".join(f"<th>{heading}</th>" for heading in headings) + "</tr>"]
    for result in results:
        cells = _cells(result, unit, result.row in front)
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _cells(result: Result, unit: str, on_front: bool) -> list[str]:
    speed, memory = result.speed, result.measured
    if result.status != "ok" or speed is None:
        return [result.title, result.status.replace("_", " "), "", "", _predicted(result), "", ""]
    per_second = getattr(speed, f"{unit}_per_second")
    error = result.prediction_error
    return [
        result.title,
        "" if per_second is None else f"{per_second:,.0f}",
        f"{speed.step_seconds_median:.3g} ({speed.step_seconds_q05:.3g} to {speed.step_seconds_q95:.3g})",
        format_bytes(memory.allocated_bytes) if memory is not None and memory.allocated_bytes else "",
        _predicted(result),
        percent(error),
        "yes" if on_front else "",
    ]


def _predicted(result: Result) -> str:
    return format_bytes(result.predicted.allocated_bytes) if result.predicted else ""


# --- the report -------------------------------------------------------------------------------------------------------


def write_report(title: str, results: Sequence[Result], folder: Path, command: str) -> list[Path]:
    """Write `points.csv`, one PNG per picture and `report.html` into a folder, in place of older ones.

    Args:
        title: The sweep's title.
        results: The sweep's records.
        folder: The folder that holds the records.
        command: Command line that makes the report, shown on its page.

    Returns:
        The files that were written.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; `points.csv` is written all the same.
    """
    table = folder / "points.csv"
    table.write_text(as_csv(results), encoding="utf-8")
    points = points_of(results)
    figures = draw(points, curves_of(points), unit_of(results))
    written = [table]
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        write_png(figure, written[-1])
    written.append(folder / "report.html")
    written[-1].write_text(page(title, results, figures, command), encoding="utf-8")
    return written
