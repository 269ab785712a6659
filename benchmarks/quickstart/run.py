"""Run the quickstart and keep its report: `python -m benchmarks.quickstart.run`, two minutes on two idle cores.

Writes `benchmarks/results/quickstart_cpu.json`, whose figures the README shows.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_memfit.bench.record import commit, hardware, versions

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "quickstart_cpu.json"
FIT = "python -m cli fit --config recipes/quickstart.yaml"
KEEP = """
trainer:
  enable_progress_bar: false
  callbacks+:
    - class_path: lightning_memfit.measure.monitor.MemoryMonitor
      init_args: {{report_path: {path}}}
"""


def main() -> None:
    facts = {"hardware": hardware(""), "versions": versions(), "commit": commit()}
    with tempfile.TemporaryDirectory() as folder:
        report, overlay = Path(folder) / "report.json", Path(folder) / "keep.yaml"
        overlay.write_text(KEEP.format(path=report), encoding="utf-8")
        subprocess.run([sys.executable, *FIT.split()[1:], "--config", str(overlay)], cwd=ROOT, check=True)
        figures = json.loads(report.read_text(encoding="utf-8"))
    document = {"command": "python -m benchmarks.quickstart.run", "runs": FIT, **facts, "report": figures}
    RESULTS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
