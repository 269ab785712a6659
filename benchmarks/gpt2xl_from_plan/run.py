"""Two optimizer steps of GPT-2 XL's true architecture under a simulated limit of 12 GiB, from the plan alone.

Run from the root of a checkout: `OMP_NUM_THREADS=2 python -m benchmarks.gpt2xl_from_plan.run`. `MemFit` takes the
place of the recipe's techniques. Needs 16 GiB of free memory and half an hour; writes `result.json` beside this file.
"""

from pathlib import Path

from benchmarks.record import ROOT, fit, write

HERE = Path(__file__).resolve().parent
PLACES = """
trainer:
  logger: {{init_args: {{save_dir: {folder}}}}}
  callbacks+:
    - class_path: benchmarks.gpt2xl_from_plan.record.PlanRecord
      init_args: {{path: {folder}/report.json}}
"""


def main() -> None:
    configs = ["recipes/gpt2xl.yaml", f"{HERE.relative_to(ROOT)}/override.yaml"]
    run = fit(configs, [], PLACES, needed_gib=16)
    figures = {
        "benchmark": "gpt2xl_from_plan",
        "runs": run.command,
        **run.report,
        "within_the_limit": run.report["measured_bytes"] <= run.report["limit_bytes"],
        "peak_rss_bytes": run.peak_rss_bytes,
        "seconds_total": run.seconds,
        "optimizer_steps": run.steps,
    }
    write(HERE / "result.json", figures)


if __name__ == "__main__":
    main()
