"""Two optimizer steps of GPT-2 XL's true architecture under a simulated limit of 12 GiB, from the plan alone.

Run from the root of a checkout: `OMP_NUM_THREADS=2 python -m benchmarks.gpt2xl_from_plan.run`. `memfit: auto` takes the
place of the recipe's techniques. Needs 16 GiB of free memory and half an hour; writes `result.json` beside this file.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.gpt2xl_live_bytes.run import MALLOC
from benchmarks.record import ROOT, provenance, read_metrics, run

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
NEEDED_BYTES = 16 * GIB
PLACES = """
trainer:
  logger: {{init_args: {{save_dir: {folder}}}}}
  callbacks+:
    - class_path: benchmarks.gpt2xl_from_plan.record.PlanRecord
      init_args: {{path: {folder}/plan.json}}
"""


def main() -> int:
    free = psutil.virtual_memory().available
    if free < NEEDED_BYTES:
        print(f"{free / GIB:.1f} GiB are free, {NEEDED_BYTES / GIB:.0f} are needed.", file=sys.stderr)
        return 2
    configs = ["recipes/gpt2xl.yaml", f"{HERE.relative_to(ROOT)}/override.yaml"]
    command = ["python", "-m", "cli", "fit", *(part for config in configs for part in ("--config", config))]
    command += ["--memfit", "auto"]
    with tempfile.TemporaryDirectory() as folder:
        places = Path(folder) / "places.yaml"
        places.write_text(PLACES.format(folder=folder), encoding="utf-8")
        variables = [f"{name}={value}" for name, value in MALLOC.items()]
        started = time.perf_counter()
        code, peak_rss_bytes = run(["env", *variables, sys.executable, *command[1:], "--config", str(places)])
        seconds = time.perf_counter() - started
        if code:
            print(f"`{' '.join(command)}` ended with {code}, largest resident set {peak_rss_bytes / GIB:.1f} GiB.")
            return code
        planned = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
        steps = read_metrics(Path(folder))
    result = {
        "benchmark": "gpt2xl_from_plan",
        "command": "python -m benchmarks.gpt2xl_from_plan.run",
        "runs": " ".join(command),
        **planned,
        "within_the_limit": planned["measured_bytes"] <= planned["limit_bytes"],
        "peak_rss_bytes": peak_rss_bytes,
        "seconds_total": round(seconds, 1),
        "optimizer_steps": steps,
        **provenance(),
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
