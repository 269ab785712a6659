"""`write_report`: what a sweep's records show, as CSV, pictures and a page."""

from collections.abc import Sequence
from pathlib import Path

from lightning_memfit.bench.page import page
from lightning_memfit.bench.plots import draw, write_png
from lightning_memfit.bench.record import Result
from lightning_memfit.bench.scaling import as_csv, curves_of, points_of, unit_of


def write_report(title: str, results: Sequence[Result], folder: Path, command: str) -> list[Path]:
    """Write `points.csv`, one PNG per picture and `report.html` into a folder, in place of older ones.

    Args:
        title: Of the sweep.
        results: Its records.
        folder: Where they are.
        command: What makes the report, for its page.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; `points.csv` is there all the same.
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
