"""`write_timeline`: memory by category over the traced steps as one HTML page that needs nothing else."""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_memfit.estimate.estimate import Timeline
from lightning_memfit.estimate.page import render_page
from lightning_memfit.estimate.report import EstimateReport
from lightning_memfit.memory import Category, format_bytes

# Okabe & Ito 2008: colour-blind readers can tell these apart. From the bottom up: lasting memory, then temporary.
COLOURS: dict[Category, str] = {
    Category.PARAMETER: "#0072B2",
    Category.OPTIMIZER_STATE: "#009E73",
    Category.GRADIENT: "#E69F00",
    Category.BUFFER: "#999999",
    Category.INPUT: "#F0E442",
    Category.COMMUNICATION: "#CC79A7",
    Category.ACTIVATION: "#56B4E9",
    Category.TEMPORARY: "#D55E00",
}

_NAMES = {Category.PARAMETER: "parameters", Category.OPTIMIZER_STATE: "optimizer states", Category.INPUT: "batch"}

_WIDTH, _HEIGHT = 1120, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 16, 34, 30
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_CHARACTER = 7.2  # pixels, upper end for 13 px text

DRAWING_STYLE = """
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } .grid { stroke: var(--grid); } .band { fill: var(--band); }
.edge { stroke: var(--soft); }
.limit { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 8 4; }
.hover rect { fill: transparent; } .hover rect:hover { fill: var(--ink); fill-opacity: .18; }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 22px; padding: 0; margin: 10px 0; }
li i { display: inline-block; width: 13px; height: 13px; margin-right: 7px; vertical-align: -1px;
  border: 1px solid var(--soft); }
"""
"""Of drawings of memory and their legends, also on other pages."""


def write_timeline(report: EstimateReport, path: str | Path) -> Path:
    """Write the page.

    Args:
        report: What to draw.
        path: A file that doesn't exist yet, in a folder that does.

    Raises:
        ValueError: If the file exists, or its folder doesn't.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"`--timeline {path}`: there is no folder {str(path.parent)!r}. Make it, or name another.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(render(report))
    except FileExistsError:
        raise ValueError(f"`--timeline {path}` exists already. Name another file: none is overwritten.") from None
    return path


def render(report: EstimateReport) -> str:
    """The page as text.

    Raises:
        ValueError: If the estimate has no timeline.
    """
    timeline = report.estimate.timeline
    if timeline is None or not timeline.events:
        raise ValueError("The estimate has no timeline.")
    timeline = _until_end(timeline)
    profile, estimate = report.profile, report.estimate
    title = f"{profile.name} on {report.target.name}"
    size = f"micro-batch {estimate.micro_batch_size}"
    size += f" x {profile.sequence_length} tokens" if profile.sequence_length else ""
    facts = (
        f"{profile.num_parameters:,} parameters, {profile.precision}, {profile.optimizer}, {size}. Peak of live "
        f"tensors {format_bytes(max(_totals(timeline)))} in {estimate.phase}"
    )
    if report.target.device_kind.has_caching_allocator:
        context = " and CUDA context" if report.target.runtime is not None else ""
        facts += f"; with cached memory{context} {format_bytes(estimate.total_bytes)}"
        facts += " at least" if report.target.lower_bound else ""
    body = (
        f"<p>{html.escape(facts)}.</p>\n"
        f"{_drawing(report, timeline)}\n{_legend(timeline)}\n"
        "<p>Two optimizer steps are shown. The first makes the optimizer states, the second is like every later one. "
        "The horizontal axis counts allocations and frees, not seconds; every point shows the highest moment of its "
        "stretch. Hover for figures.</p>"
    )
    return render_page(title, body, DRAWING_STYLE)


def _until_end(timeline: Timeline) -> Timeline:
    """Without the points after the last step, where the trace is taken down."""
    end = next((at for at, name in timeline.phases if name == "end"), None)
    kept = sum(1 for event in timeline.events if end is None or event < end)
    rows = tuple(row[:kept] for row in timeline.live_bytes)
    return replace(timeline, events=timeline.events[:kept], live_bytes=rows)


def _totals(timeline: Timeline) -> list[int]:
    return [sum(column) for column in zip(*timeline.live_bytes, strict=True)]


@dataclass(frozen=True)
class _Axes:
    """Positions of events and bytes on the page."""

    first_event: int
    last_event: int
    top_bytes: int

    def x(self, event: int) -> float:
        share = (event - self.first_event) / max(1, self.last_event - self.first_event)
        return round(_LEFT + min(1.0, max(0.0, share)) * _PLOT_WIDTH, 1)

    def y(self, size_bytes: float) -> float:
        return round(_TOP + _PLOT_HEIGHT * (1 - size_bytes / self.top_bytes), 1)


def _drawing(report: EstimateReport, timeline: Timeline) -> str:
    peak, limit = max(_totals(timeline)), _tensor_limit(report)
    is_near = limit is not None and limit <= 2 * peak
    top = max(peak, limit) if limit is not None and is_near else peak
    axes = _Axes(timeline.events[0], timeline.events[-1], int(top * 1.1) or 1)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Memory by category over the step">']
    parts += [_bands(axes, timeline), _grid(axes), _areas(axes, timeline)]
    if limit is not None and is_near:
        y, text = axes.y(limit), f"room for tensors on {report.target.name}: {format_bytes(limit)}"
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT + 4}" y="{_TOP - 14}">- - {html.escape(text)}</text>')
    return "\n".join([*parts, _hover(axes, timeline), "</svg>"])


def _tensor_limit(report: EstimateReport) -> int | None:
    """Bytes that live tensors may take: the target less margin, context, workspaces and fragmentation."""
    usable, estimate = report.target.usable_bytes, report.estimate
    if usable is None or estimate.timeline is None:
        return None
    return max(0, usable - (estimate.total_bytes - max(_totals(estimate.timeline))))


def _areas(axes: _Axes, timeline: Timeline) -> str:
    xs = [axes.x(event) for event in timeline.events]
    below = [0] * len(xs)
    rows = dict(zip(timeline.categories, timeline.live_bytes, strict=True))
    shapes = []
    for category, colour in COLOURS.items():
        if category not in rows:
            continue
        above = [low + size for low, size in zip(below, rows[category], strict=True)]
        there = " ".join(f"{x},{axes.y(size)}" for x, size in zip(xs, above, strict=True))
        back = " ".join(f"{x},{axes.y(size)}" for x, size in zip(reversed(xs), reversed(below), strict=True))
        shapes.append(f'<polygon fill="{colour}" points="{there} {back}"/>')
        below = above
    return "".join(shapes)


def _grid(axes: _Axes) -> str:
    parts = []
    for fifth in range(6):
        size = axes.top_bytes * fifth // 5
        y = axes.y(size)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="soft" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{format_bytes(size)}</text>')
    return "".join(parts)


def _bands(axes: _Axes, timeline: Timeline) -> str:
    """Phases below the axis, every other one shaded; names that have no room are shown where the mouse is."""
    starts = [*(at for at, _ in timeline.phases), axes.last_event]
    parts, base = [], _TOP + _PLOT_HEIGHT
    for index, (at, name) in enumerate(timeline.phases):
        left, right = axes.x(at), axes.x(starts[index + 1])
        if name == "end" or right <= left:
            continue
        if index % 2:
            parts.append(
                f'<rect class="band" x="{left}" y="{_TOP}" width="{right - left:.1f}" height="{_PLOT_HEIGHT}"/>'
            )
        parts.append(f'<line class="edge" x1="{left}" x2="{left}" y1="{base}" y2="{base + 6}"/>')
        if len(name) * _CHARACTER < right - left:
            parts.append(f'<text x="{(left + right) / 2:.1f}" y="{base + 20}" text-anchor="middle">{name}</text>')
    return "".join(parts)


def _hover(axes: _Axes, timeline: Timeline) -> str:
    xs = [axes.x(event) for event in timeline.events]
    edges = [*xs, float(_WIDTH - _RIGHT)]
    totals = _totals(timeline)
    parts = ['<g class="hover">']
    for index, x in enumerate(xs):
        lines = [f"{_phase(timeline, timeline.events[index])}: {format_bytes(totals[index])}"]
        lines += [
            f"{_label(category)} {format_bytes(row[index])}"
            for category, row in zip(timeline.categories, timeline.live_bytes, strict=True)
            if row[index]
        ]
        width = max(0.5, edges[index + 1] - x)
        parts.append(
            f'<rect x="{x}" y="{_TOP}" width="{width:.1f}" height="{_PLOT_HEIGHT}"><title>'
            + "\n".join(lines)
            + "</title></rect>"
        )
    return "".join(parts) + "</g>"


def _phase(timeline: Timeline, event: int) -> str:
    return next((name for at, name in reversed(timeline.phases) if at <= event), "setup")


def _label(category: Category) -> str:
    return _NAMES.get(category, category.value.replace("_", " ") + ("" if category is Category.TEMPORARY else "s"))


def _legend(timeline: Timeline) -> str:
    at = _totals(timeline).index(max(_totals(timeline)))
    rows = dict(zip(timeline.categories, timeline.live_bytes, strict=True))
    items = [
        f'<li><i style="background:{colour}"></i>{_label(category)}, {format_bytes(rows[category][at])}</li>'
        for category, colour in COLOURS.items()
        if category in rows
    ]
    return f"<ul><li>At the peak:</li>{''.join(items)}</ul>"
