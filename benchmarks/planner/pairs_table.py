"""Write how good plans are into the plan guide: `python -m benchmarks.planner.pairs_table`."""

import json
import statistics
from typing import Any

from benchmarks.marks import insert
from benchmarks.planner.pairs import RESULTS
from benchmarks.planner.table import PAGE

MARK = "pairs"


def render(document: dict[str, Any]) -> str:
    """A sentence with the totals, and one row per model and limit."""
    models = document["models"]
    pairs = [pair for model in models for pair in model["pairs"]]
    made = [pair for pair in pairs if "setting" in pair]
    refused = [pair for pair in pairs if "setting" not in pair]
    right = sum(not pair["num_fitting"] for pair in refused)
    slower = [pair["slower_than_best"] for pair in made if pair["slower_than_best"] is not None]
    ranks = ", ".join(f"{model['model']} {model['rank_correlation']:.2f}" for model in models)
    settings, known = len(models[0]["grid"]), models[0]["num_calibrating"]
    lines = [
        f"{sum(pair['fits'] for pair in made)} of {len(made)} plans fit at the first try, none died; of {len(refused)} "
        f"refused limits {right} hold nothing of the grid either. {sum(s <= 0.1 for s in slower)} of {len(slower)} are "
        f"within 10 % of the grid's best, the slowest {max(slower):+.0%}, the median "
        f"{statistics.median(slower):+.0%}; below zero, the plan is better than all of the grid. Rank correlation of "
        f"predicted with measured times: {ranks} ({settings} settings each, {known} of them known to the planner). "
        f"torch {document['versions']['torch']}, one CPU thread, `{document['command']}`.",
        "",
        "| model | limit | plan | predicted peak | measured peak | step | best of the grid | step | plan against it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(model["model"], pair) for model in models for pair in model["pairs"])])


def _row(model: str, pair: dict[str, Any]) -> str:
    limit = f"| {model} | {pair['limit_bytes'] / 2**20:.0f} MiB "
    if "setting" not in pair:
        return f"{limit}| {pair['plan']} | | | | | | |"
    peak = "ran out of memory" if pair["peak_bytes"] is None else f"{pair['peak_bytes'] / 2**20:.1f} MiB"
    row = f"{limit}| {pair['setting']} | {pair['predicted_peak_bytes'] / 2**20:.1f} MiB | {peak} "
    row += f"| {1000 * pair['seconds']:.0f} ms "
    if pair["best"] is None:
        return f"{row}| none of the grid fits | | |"
    return f"{row}| {pair['best']} | {1000 * pair['best_s']:.0f} ms | {pair['slower_than_best']:+.0%} |"


def main() -> None:
    PAGE.write_text(insert(PAGE.read_text(), MARK, render(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
