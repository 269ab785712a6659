"""What a sweep shows: speed-up, efficiency, memory against prediction, and the Pareto front of speed and memory."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_memfit.bench.record import Result


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
    unit, varying = unit_of(results), _varying_axes(results)
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
    figures = (
        "samples_per_second",
        "tokens_per_second",
        "step_seconds_median",
        "step_seconds_q05",
        "step_seconds_q95",
    )
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


def _varying_axes(results: Sequence[Result]) -> list[str]:
    axes = dict.fromkeys(axis for result in results for axis in result.point)
    return [axis for axis in axes if axis != "devices" and len({str(result.point.get(axis)) for result in results}) > 1]


def _label(point: dict[str, Any], varying: list[str]) -> str:
    ordered = sorted(varying, key=lambda axis: (axis != "model", axis != "technique"))
    return ", ".join(_NAMES.get(axis, "{}").format(point.get(axis)) for axis in ordered) or "all"
