"""`write_timeline`: memory by category over the traced steps as one HTML page that needs nothing else."""

from __future__ import annotations

import html
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

_LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 90, 34, 1014, 376
_BASE, _END = _TOP + _PLOT_HEIGHT, _LEFT + _PLOT_WIDTH
_CHARACTER = 7.2  # pixels, upper end for 13 px text

DRAWING_STYLE = """
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } .grid { stroke: var(--grid); } .band { fill: var(--band); }
.edge { stroke: var(--soft); }
.limit { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 8 4; }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 22px; padding: 0; margin: 10px 0; }
li i { display: inline-block; width: 13px; height: 13px; margin-right: 7px; vertical-align: -1px;
  border: 1px solid var(--soft); }
"""
"""Of drawings of memory and their legends, also on other pages."""


def write_timeline(report: EstimateReport, path: str | Path) -> Path:
    """Write the page to a file that doesn't exist yet, in a folder that does.

    Raises:
        ValueError: If the file exists, or its folder doesn't.
    """
    path, page = Path(path), render(report)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(page)
    except FileExistsError:
        raise ValueError(f"`--timeline {path}` exists already. Name another file: none is overwritten.") from None
    except OSError as error:
        raise ValueError(f"`--timeline {path}` can't be written: {error.strerror}.") from error
    return path


def render(report: EstimateReport) -> str:
    """The page as text.

    Raises:
        ValueError: If the estimate has no timeline.
    """
    timeline, profile, estimate, target = report.estimate.timeline, report.profile, report.estimate, report.target
    if timeline is None or not timeline.events:
        raise ValueError("The estimate has no timeline.")
    end = next(
        (at for at, name in timeline.phases if name == "end"), timeline.events[-1] + 1
    )  # the trace is taken down
    events = [event for event in timeline.events if event < end]
    totals = [sum(column) for column in zip(*timeline.live_bytes, strict=True)][: len(events)]
    peak = max(totals)
    size = f"micro-batch {estimate.micro_batch_size}"
    size += f" x {profile.sequence_length} tokens" if profile.sequence_length else ""
    facts = (
        f"{profile.num_parameters:,} parameters, {profile.precision}, {profile.optimizer}, {size}. Peak of live "
        f"tensors {format_bytes(peak)} in {estimate.phase}"
    )
    if target.device_kind.has_caching_allocator:
        context = " and CUDA context" if target.runtime is not None else ""
        facts += f"; with cached memory{context} {format_bytes(estimate.total_bytes)}"
    # Bytes that live tensors may take: the target less margin, context, workspaces and fragmentation.
    room = None if target.usable_bytes is None else max(0, target.usable_bytes - estimate.total_bytes + peak)
    rows = dict(zip(timeline.categories, timeline.live_bytes, strict=True))
    legend = "".join(
        f'<li><i style="background:{colour}"></i>{_label(category)}, '
        f"{format_bytes(rows[category][totals.index(peak)])}</li>"
        for category, colour in COLOURS.items()
        if category in rows
    )
    body = (
        f"<p>{html.escape(facts)}.</p>\n"
        f"{_drawing(timeline, events, rows, peak, room, target.name)}\n<ul><li>At the peak:</li>{legend}</ul>\n"
        "<p>Two optimizer steps are shown. The first makes the optimizer states, the second is like every later one. "
        "The horizontal axis counts allocations and frees, not seconds; every point shows the highest moment of its "
        "stretch.</p>"
    )
    return render_page(f"{profile.name} on {target.name}", body, DRAWING_STYLE)


def _drawing(
    timeline: Timeline,
    events: list[int],
    rows: dict[Category, tuple[int, ...]],
    peak: int,
    room: int | None,
    device: str,
) -> str:
    is_near = room is not None and room <= 2 * peak
    top = int(1.1 * max(peak, room if room is not None and is_near else 0)) or 1

    def x(event: int) -> float:
        share = (event - events[0]) / max(1, events[-1] - events[0])
        return round(_LEFT + min(1.0, max(0.0, share)) * _PLOT_WIDTH, 1)

    def y(size_bytes: int) -> float:
        return round(_BASE - _PLOT_HEIGHT * size_bytes / top, 1)

    parts = ['<svg viewBox="0 0 1120 440" role="img" aria-label="Memory by category over the step">']
    edges = [*(at for at, _ in timeline.phases), events[-1]]
    for index, (at, name) in enumerate(timeline.phases):  # every other one is shaded; those without room have no name
        left, right = x(at), x(edges[index + 1])
        if name == "end" or right <= left:
            continue
        if index % 2:
            shape = f'x="{left}" y="{_TOP}" width="{right - left:.1f}" height="{_PLOT_HEIGHT}"'
            parts.append(f'<rect class="band" {shape}/>')
        parts.append(f'<line class="edge" x1="{left}" x2="{left}" y1="{_BASE}" y2="{_BASE + 6}"/>')
        if len(name) * _CHARACTER < right - left:
            parts.append(f'<text x="{(left + right) / 2:.1f}" y="{_BASE + 20}" text-anchor="middle">{name}</text>')
    for size in (top * fifth // 5 for fifth in range(6)):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_END}" y1="{y(size)}" y2="{y(size)}"/>')
        text = f'<text class="soft" x="{_LEFT - 8}" y="{y(size) + 4}" text-anchor="end">'
        parts.append(f"{text}{format_bytes(size)}</text>")
    below = [0] * len(events)
    for category in (one for one in COLOURS if one in rows):
        above = [low + size for low, size in zip(below, rows[category], strict=False)]
        there = [f"{x(event)},{y(size)}" for event, size in zip(events, above, strict=True)]
        back = [f"{x(event)},{y(size)}" for event, size in zip(events, below, strict=True)]
        parts.append(f'<polygon fill="{COLOURS[category]}" points="{" ".join([*there, *reversed(back)])}"/>')
        below = above
    if room is not None and is_near:
        text = f"- - room for tensors on {device}: {format_bytes(room)}"
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_END}" y1="{y(room)}" y2="{y(room)}"/>')
        parts.append(f'<text x="{_LEFT + 4}" y="{_TOP - 14}">{html.escape(text)}</text>')
    return "\n".join([*parts, "</svg>"])


def _label(category: Category) -> str:
    return _NAMES.get(category, category.value.replace("_", " ") + ("" if category is Category.TEMPORARY else "s"))
