"""The report of a sweep as one HTML page that loads nothing."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_memfit.bench.plots import as_svg
from lightning_memfit.bench.record import Result
from lightning_memfit.bench.scaling import pareto_front, points_of, unit_of
from lightning_memfit.bench.table import percent, remarks
from lightning_memfit.memory import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { margin: 24px auto; max-width: 980px; padding: 0 12px; background: #ffffff; color: #1b1b1b;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 4px; }
p, li { color: #5b5b5b; margin: 0 0 6px; } figure { margin: 0; } svg { max-width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #d8d8d8; white-space: nowrap; }
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


def page(title: str, results: Sequence[Result], figures: Mapping[str, "Figure"], command: str) -> str:
    """The whole page.

    Args:
        title: Of the sweep.
        results: All runs.
        figures: From `plots.draw`.
        command: What makes the page.
    """
    parts = [
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>",
        f"<p>{len(results)} runs. Made by <code>{html.escape(command)}</code>.</p>",
    ]
    for name, figure in figures.items():
        heading, caption = _CAPTIONS[name]
        parts.append(
            f"<h2>{heading}</h2>\n<p>{html.escape(caption)}</p>\n"
            f'<figure role="img" aria-label="{heading}">{as_svg(figure, name)}</figure>'
        )
    parts.append(f'<h2>All runs</h2>\n<div class="wide">{runs_table(results)}</div>')
    parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in remarks(results)) + "</ul></html>\n")
    return "\n".join(parts)


def runs_table(results: Sequence[Result]) -> str:
    """Figures of every run."""
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
