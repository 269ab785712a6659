"""`write_report`: what a sweep's records show, as a CSV file, pictures and a Markdown page with all of it.

`draw` makes the pictures with matplotlib (the extra `plot`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memfit.bench.record import Result
from lightning_memfit.bench.scaling import Point, as_csv, curves_of, pareto_front, points_of, unit_of
from lightning_memfit.bench.table import markdown
from lightning_memfit.extras import require
from lightning_memfit.memory import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- pictures ---------------------------------------------------------------------------------------------------------

# Colours that colour-blind readers can tell apart: Okabe & Ito 2008, without the yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "os^DvPX*"
_SOFT = "#5b5b5b"
_BAND = 0.05


def draw(points: Sequence[Point], unit: str) -> dict[str, Figure]:
    """Draw every picture that the points allow, by name."""
    require("matplotlib", "Drawing the report's pictures")
    figures, curves = {}, curves_of(points)
    if curves:
        figures["speedup"] = _speedup(curves)
    if any(point.predicted_bytes is not None for point in points):
        figures["memory"] = _memory(points)
    if points:
        figures["pareto"] = _pareto(points, unit)
    return figures


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), facecolor="white")
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(color="#d8d8d8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Axes) -> None:
    """Put a legend of any length beside the axes; files are cut to what is drawn."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=9)


def _speedup(curves: Mapping[str, Sequence[Point]]) -> Figure:
    figure, axes = _axes("processes", "speed-up (times the speed of one process)")
    numbers = sorted({point.devices for curve in curves.values() for point in curve})
    axes.plot(numbers, numbers, "--", color=_SOFT, label="ideal")
    for index, (label, curve) in enumerate(curves.items()):
        below = [point.per_second - point.per_second_low for point in curve]
        above = [point.per_second_high - point.per_second for point in curve]
        most = curve[-1]
        axes.errorbar(
            [point.devices for point in curve],
            [point.per_second for point in curve],
            yerr=[[0.0, *below[1:]], [0.0, *above[1:]]],  # the first is 1 by definition
            label=f"{label} ({most.per_second / most.devices:.0%} efficient on {most.devices})",
            color=COLOURS[index % len(COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            capsize=3,
            linewidth=1.5,
        )
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def _memory(points: Sequence[Point]) -> Figure:
    known = [point for point in points if point.predicted_bytes is not None]
    unit, name = _unit(known)
    figure, axes = _axes(f"measured peak of a process ({name})", f"predicted peak ({name})")
    top = 1.08 * max(max(point.measured_bytes, point.predicted_bytes or 0) for point in known) / unit
    axes.plot([0, top], [0, top], "--", color=_SOFT, label="prediction equals measurement")
    low, high = [0, top * (1 - _BAND)], [0, top * (1 + _BAND)]
    axes.fill_between([0, top], low, high, color="#000000", alpha=0.08, linewidth=0, label=f"within {_BAND:.0%}")
    _scatter(axes, known, unit, lambda point: (point.predicted_bytes or 0) / unit)
    axes.set(xlim=(0, top), ylim=(0, top))
    axes.set_aspect("equal", adjustable="box")
    _legend(axes)
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
    axes.errorbar(
        [point.measured_bytes / scale for point in points],
        [point.per_second for point in points],
        yerr=[
            [point.per_second - point.per_second_low for point in points],
            [point.per_second_high - point.per_second for point in points],
        ],
        fmt="none",
        ecolor="#b0b0b0",
        elinewidth=1,
        zorder=2,
    )
    _scatter(axes, points, scale, lambda point: point.per_second)
    axes.set_xlim(0, 1.08 * max(point.measured_bytes for point in points) / scale)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def _scatter(axes: Axes, points: Sequence[Point], unit: int, height: Any) -> None:
    """Draw points whose colours show the technique, and whose shapes show the number of processes."""
    techniques = list(dict.fromkeys(point.technique for point in points))
    numbers = sorted({point.devices for point in points})
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.technique, point.devices), []).append(point)
    for (technique, devices), group in groups.items():
        processes = "1 process" if devices == 1 else f"{devices} processes"
        axes.scatter(
            [point.measured_bytes / unit for point in group],
            [height(point) for point in group],
            label=f"{technique}, {processes}" if technique else processes,
            color=COLOURS[techniques.index(technique) % len(COLOURS)],
            marker=_MARKERS[numbers.index(devices) % len(_MARKERS)],
            edgecolors="white",
            linewidths=0.6,
            s=46,
            zorder=3,
        )


def _unit(points: Sequence[Point]) -> tuple[int, str]:
    return (GIB, "GiB") if max(point.measured_bytes for point in points) >= 2 * GIB else (MIB, "MiB")


# --- the report -------------------------------------------------------------------------------------------------------


_CAPTIONS = {
    "speedup": "Speed of all processes against that of one, all else equal, and how efficient the most processes are.",
    "memory": "Peak of live tensors of the first process, and what was predicted before the run.",
    "pareto": "Speed and memory: no run beats one on the front in both.",
}


def page(title: str, results: Sequence[Result], pictures: Sequence[str], command: str) -> str:
    """Return the page as Markdown."""
    shown = "".join(f"\n{_CAPTIONS[name]}\n\n![{name}]({name}.png)\n" for name in pictures)
    bars = "Bars are the 5 % to 95 % quantiles of the step times." if pictures else ""
    made = f"{len(results)} runs. Made by `{command}`. {bars}".strip()
    return f"# {title}\n{made}\n{shown}\n{markdown(results)}"


def write_report(title: str, results: Sequence[Result], folder: Path, command: str) -> list[Path]:
    """Write `points.csv`, one PNG per picture and `report.md` into a folder, in place of older ones."""
    written = [folder / "points.csv"]
    written[0].write_text(as_csv(results), encoding="utf-8")
    points = points_of(results)
    figures = draw(points, unit_of(results))
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=150, bbox_inches="tight", metadata={"Software": None})
    written.append(folder / "report.md")
    written[-1].write_text(page(title, results, list(figures), command), encoding="utf-8")
    return written
