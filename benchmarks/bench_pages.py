"""`docs/benchmarks/NAME.md` from the records of `memfit bench`."""

from dataclasses import replace
from pathlib import Path

from benchmarks.marks import RESULTS
from benchmarks.side_by_side import remarks_on, side_by_side
from benchmarks.slower import paragraph
from cli.bench import read_recipe
from lightning_memfit.bench.experiment import Experiment, load_experiment
from lightning_memfit.bench.record import Result, read_result
from lightning_memfit.bench.table import remarks, rows_table

_IN_RECORDS = ("step s", "loss", "source: samples/s", "source: MB")
_IN_TABLES = ("samples/s", "speed x first", "memory x first")
"""Columns that pages leave out: what the records tell beside the rates, and what tables of several tools show."""
VARIANTS = (("cpu", "small"), ("cuda", "full"))


def results_of(experiment: Experiment) -> list[Result]:
    """Committed records, in the order of the experiment's rows."""
    files = (RESULTS / experiment.folder_name / f"{row.name}.json" for row in experiment.rows)
    return [read_result(file) for file in files if file.exists()]


def page(file: Path) -> str:
    """One experiment's page."""
    variants = [load_experiment(file, scale, device, read_recipe) for device, scale in VARIANTS]
    first = variants[0]
    lines = [
        f"# {first.title}",
        f"`python -m benchmarks.pages` writes this page from `benchmarks/results/{first.name}_*/`; the rows are "
        f"in `benchmarks/experiments/{file.name}`.",
    ]
    if first.source:
        hardware, note = first.source.get("hardware", ""), first.source.get("note", "")
        lines += ["", f"Source of the figures beside ours: {first.source.get('name', '')}; {hardware}. {note}".strip()]
        lines.append("Columns `x first` compare with the first row of the same machine.")
    if first.notes:
        lines += ["", *(f"- {note}" for note in first.notes)]
    slower = "".join(paragraph(results_of(one), _title(one)) for one in variants)
    return "\n".join(lines) + "\n" + slower + "".join(map(_section, variants))


def _title(experiment: Experiment) -> str:
    return f"{experiment.device.upper()}, {experiment.scale} scale"


def _section(experiment: Experiment) -> str:
    command = f"memfit bench --experiment {experiment.name} --device {experiment.device} --scale {experiment.scale}"
    heading = f"\n## {_title(experiment)}\n"
    results = results_of(experiment)
    if not results:
        return f"\nNot measured on {experiment.device.upper()} yet: `{command} --folder benchmarks/results`.\n"
    keys = {row.name: row.key for row in experiment.rows}
    stale = ", ".join(result.title for result in results if result.key != keys[result.row])
    lines = [*remarks(results), *([f"Measured before their settings changed: {stale}."] if stale else [])]
    ours = [result for result in results if not result.peer]
    beside = ""
    if any(result.group for result in results):
        beside = f"{side_by_side(results)}\n**Ours**\n\n"
        lines += remarks_on(beside)
        ours = [replace(result, title=result.group) for result in ours]
    listed = "".join(f"- {line}\n" for line in lines)
    without = _IN_RECORDS + (_IN_TABLES if beside else ())
    return f"{heading}`{command}`\n\n{beside}{rows_table(ours, without)}\n{listed}"
