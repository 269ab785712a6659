"""Write `docs/benchmarks/*.md` from the records of `memfit bench`: `python -m benchmarks.bench_pages`."""

from pathlib import Path

from benchmarks.slower import paragraph
from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.experiment import Experiment, load_experiment
from lightning_memfit.bench.record import Result, read_result
from lightning_memfit.bench.table import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"
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
        f"Generated from `benchmarks/results/{first.name}_*/` by `python -m benchmarks.bench_pages`. What is run is "
        f"in `benchmarks/experiments/{file.name}`, what the records hold in `benchmarks/README.md`.",
    ]
    if first.source:
        hardware, note = first.source.get("hardware", ""), first.source.get("note", "")
        lines += ["", f"Source of the figures beside ours: {first.source.get('name', '')}; {hardware}. {note}".strip()]
        lines.append(
            "Columns `x first` compare with the first row of the same machine; absolute figures don't compare."
        )
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
        return f"{heading}Not measured yet: `{command} --folder benchmarks/results`, then this page's command.\n"
    minutes = sum(result.seconds for result in results) / 60
    keys = {row.name: row.key for row in experiment.rows}
    stale = "".join(
        f"- {result.title}: measured before its settings changed: `{result.command} --repeat`\n"
        for result in results
        if result.key != keys[result.row]
    )
    return f"{heading}`{command}`, {minutes:.1f} minutes in all.\n\n{markdown(results)}{stale}"


def main() -> None:
    PAGES.mkdir(parents=True, exist_ok=True)
    for file in sorted(FOLDER.glob("*.yaml")):
        target = PAGES / f"{file.stem}.md"
        target.write_text(page(file), encoding="utf-8")
        print(f"wrote {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
