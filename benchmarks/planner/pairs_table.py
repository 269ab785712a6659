"""Write how good plans are into the plan guide: `python -m benchmarks.planner.pairs_table`."""

import json
from typing import Any

from benchmarks.marks import insert
from benchmarks.planner.pairs import RESULTS
from benchmarks.planner.table import PAGE

MARK = "pairs"


def render(document: dict[str, Any]) -> str:
    """A sentence with the totals, and one row per model and limit."""
    models = document["models"]
    pairs = [pair for model in models for pair in model["pairs"]]
    fits = sum(bool(pair.get("fits")) for pair in pairs)
    slower = [pair["slower_than_best"] for pair in pairs if pair.get("slower_than_best") is not None]
    ranks = ", ".join(f"{model['model']} {model['rank_correlation']:.2f}" for model in models)
    settings, known = len(models[0]["grid"]), models[0]["num_calibrating"]
    lines = [
        f"{fits} of {len(pairs)} plans fit at the first try. {sum(s <= 0.1 for s in slower)} of the {len(slower)} "
        f"beside which something of the grid fits are within 10 % of its best, the slowest {max(slower):+.0%}, "
        f"the median {sorted(slower)[len(slower) // 2]:+.0%}. Rank correlation of predicted with measured times: "
        f"{ranks} ({settings} settings each, {known} of them known to the planner). "
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
