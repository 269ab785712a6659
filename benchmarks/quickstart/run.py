"""Run the quickstart and keep its report: `python -m benchmarks.quickstart.run`, two minutes on two idle cores.

Writes `benchmarks/results/quickstart_cpu.json`, whose figures the README shows.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import ROOT, write

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
    with tempfile.TemporaryDirectory() as folder:
        report, overlay = Path(folder) / "report.json", Path(folder) / "keep.yaml"
        overlay.write_text(KEEP.format(path=report), encoding="utf-8")
        subprocess.run([sys.executable, *FIT.split()[1:], "--config", str(overlay)], cwd=ROOT, check=True)
        figures = json.loads(report.read_text(encoding="utf-8"))
    write(RESULTS, {"runs": FIT, "report": figures})


if __name__ == "__main__":
    main()
