"""`write_report`: what a sweep's records show, as a CSV file, pictures and a Markdown page with all of it.

`draw` makes the pictures with matplotlib (the extra `plot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memfit.bench.record import Result
from lightning_memfit.bench.scaling import Point, as_csv, curves_of, pareto_front, points_of, unit_of
from lightning_memfit.bench.table import markdown
from lightning_memfit.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(points: Sequence[Point], unit: str) -> dict[str, Figure]:
    """Draw every picture that the points allow, by name."""
    require("matplotlib", "Drawing the report's pictures")
    figures, curves = {}, curves_of(points)
    if curves:
        figures["speedup"], axes = _picture("processes", "speed-up (times the speed of one process)")
        numbers = sorted({point.devices for curve in curves.values() for point in curve})
        axes.plot(numbers, numbers, "k--", label="ideal")
        for label, curve in curves.items():
            efficient = f"{label} ({curve[-1].per_second / curve[-1].devices:.0%} efficient on {curve[-1].devices})"
            axes.plot(*_columns(curve, "devices", "per_second"), "o-", label=efficient)
        axes.legend()
    known = [point for point in points if point.predicted_bytes is not None]
    if known:
        figures["memory"], axes = _picture("measured peak of a process (bytes)", "predicted peak (bytes)")
        axes.scatter(*_columns(known, "measured_bytes", "predicted_bytes"))
        axes.axline((0, 0), slope=1, color="k", linestyle="--", label="prediction equals measurement")
        axes.legend()
    if points:
        figures["pareto"], axes = _picture("measured peak of a process (bytes)", f"{unit}/s of all processes")
        for technique in dict.fromkeys(point.technique for point in points):
            group = [point for point in points if point.technique == technique]
            axes.scatter(*_columns(group, "measured_bytes", "per_second"), label=technique or None)
        front = _columns(pareto_front(points), "measured_bytes", "per_second")
        axes.plot(*front, "k-", drawstyle="steps-post", linewidth=1, label="Pareto front")
        axes.legend()
    return figures


def _picture(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _columns(points: Sequence[Point], *names: str) -> list[list[Any]]:
    return [[getattr(point, name) for point in points] for name in names]


# --- the report -------------------------------------------------------------------------------------------------------


_CAPTIONS = {
    "speedup": "Speed of all processes against that of one, all else equal, and how efficient the most processes are.",
    "memory": "Peak of live tensors of the first process, and what was predicted before the run.",
    "pareto": "Speed and memory: no run beats one on the front in both.",
}


def page(title: str, results: Sequence[Result], pictures: Sequence[str], command: str) -> str:
    """Return the page as Markdown."""
    shown = "".join(f"\n{_CAPTIONS[name]}\n\n![{name}]({name}.png)\n" for name in pictures)
    made = f"{len(results)} runs. Made by `{command}`."
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
