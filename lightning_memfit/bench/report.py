"""`write_report`: what a sweep's records show, as a CSV file, pictures and a Markdown page with all of it.

The figures are speed-up, efficiency, memory against prediction, and the Pareto front of speed and memory; `draw` makes
pictures of them with matplotlib (the extra `plot`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memfit.bench.record import Result
from lightning_memfit.bench.table import markdown
from lightning_memfit.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One measured run of a sweep that has a speed and a memory figure."""

    label: str
    """Everything except the number of processes; points with the same label make a curve."""
    devices: int
    per_second: float
    """Tokens of all processes per second, or samples if batches have no tokens."""
    measured_bytes: int
    """Peak of live tensors of the first process."""
    predicted_bytes: int | None
    technique: str = ""
    row: str = ""


def unit_of(results: Sequence[Result]) -> str:
    """Return `tokens` if all results have them, otherwise `samples`."""
    measured = [result.speed for result in results if result.speed is not None]
    return "tokens" if measured and all(speed.tokens_per_second for speed in measured) else "samples"


def points_of(results: Sequence[Result]) -> list[Point]:
    """Return the points of the successful results."""
    unit, axes = unit_of(results), dict.fromkeys(axis for result in results for axis in result.point)
    varying = [one for one in axes if one != "devices" and len({str(result.point.get(one)) for result in results}) > 1]
    points = []
    for result in results:
        speed, memory = result.speed, result.measured
        if result.status != "ok" or speed is None or memory is None or memory.allocated_bytes is None:
            continue
        per_second = getattr(speed, f"{unit}_per_second")
        if per_second is None:
            continue
        points.append(
            Point(
                label=_label(result.point, varying),
                devices=int(result.point.get("devices", 1)),
                per_second=per_second,
                measured_bytes=memory.allocated_bytes,
                predicted_bytes=result.predicted.allocated_bytes if result.predicted else None,
                technique=str(result.point.get("technique", "")),
                row=result.row,
            )
        )
    return points


def curves_of(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of every label that was measured with at least two numbers of processes, by that number.

    Their speeds are relative to that of the fewest processes, times their number.
    """
    by_label: dict[str, list[Point]] = {}
    for point in points:
        by_label.setdefault(point.label, []).append(point)
    curves = {}
    for label, group in by_label.items():
        group = sorted(group, key=lambda point: point.devices)
        if group[0].devices < group[-1].devices:
            curves[label] = [
                replace(point, per_second=point.per_second * group[0].devices / group[0].per_second) for point in group
            ]
    return curves


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both speed and memory per process, in order of memory."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.measured_bytes, -point.per_second)):
        if not front or point.per_second > front[-1].per_second:
            front.append(point)
    return front


def as_csv(results: Sequence[Result]) -> str:
    """Return CSV with one line per run: its position in the matrix, its figures and how it ended."""
    axes = list(dict.fromkeys(axis for result in results for axis in result.point))
    figures = [f"{unit}_per_second" for unit in ("samples", "tokens")]
    figures += [f"step_seconds_{part}" for part in ("median", "q05", "q95")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", *axes, "status", *figures, "measured_bytes", "predicted_bytes", "peak_rss_bytes"])
    for result in results:
        writer.writerow(
            [
                result.row,
                *(result.point.get(axis, "") for axis in axes),
                result.status,
                *(getattr(result.speed, name, None) for name in figures),
                result.measured.allocated_bytes if result.measured else None,
                result.predicted.allocated_bytes if result.predicted else None,
                result.measured.peak_rss_bytes if result.measured else None,
            ]
        )
    return text.getvalue()


_NAMES = {"micro_batch_size": "micro-batch {}", "sequence_length": "{} tokens"}


def _label(point: dict[str, Any], varying: list[str]) -> str:
    ordered = sorted(varying, key=lambda axis: (axis != "model", axis != "technique"))
    return ", ".join(_NAMES.get(axis, "{}").format(point.get(axis)) for axis in ordered) or "all"


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
