"""Put the quickstart's report into the README: `python -m benchmarks.quickstart.table`."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.marks import insert
from benchmarks.quickstart.run import RESULTS
from lightning_memfit.measure.report import RunReport
from lightning_memfit.memory import MemoryBreakdown

PAGE = Path(__file__).parents[2] / "README.md"
MARK = "quickstart"
_WIDTH = 80
_SPEEDS = ("│ tokens/s", "│ samples/s", "│ optimizer step")


def render(document: dict[str, Any]) -> str:
    """The report as the terminal shows it, and what it means."""
    report = _report(document["report"])
    assert report.prediction_error is not None
    assert report.first_loss is not None
    assert report.last_loss is not None
    hardware = document["hardware"]
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(report.table())
    busy = hardware["load"] > hardware["cores"]
    lines = [line.rstrip() for line in out.getvalue().splitlines() if not (busy and line.startswith(_SPEEDS))]
    speeds = " Other programs kept the cores busy meanwhile, so that speeds are left out." if busy else ""
    return (
        "```\n" + "\n".join(lines) + "\n```\n\n"
        f"({hardware['cores']} cores, no GPU, `{document['command']}`.{speeds}) Validation loss falls from "
        f"{report.first_loss:.2f} after 6 optimizer steps to {report.last_loss:.2f} after {report.num_steps} (a model "
        "that knows nothing has ln 258 = 5.55). The\nmicro-batch was found under the limit, and the peak was predicted "
        "before the first step."
    )


def _report(figures: dict[str, Any]) -> RunReport:
    given = {name: value for name, value in figures.items() if name != "prediction_error"}
    for name in ("predicted", "measured"):
        given[name] = None if given[name] is None else MemoryBreakdown.from_dict(given[name])
    return RunReport(**given)


def main() -> None:
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), MARK, render(document)), encoding="utf-8")


if __name__ == "__main__":
    main()
