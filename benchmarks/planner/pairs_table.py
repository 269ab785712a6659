"""How good plans are, beside the grid's best."""

import statistics
from typing import Any

from lightning_memfit.planner.workload import DEFAULT_TOLERANCE


def render(document: dict[str, Any]) -> str:
    """Sentences with the totals, and one row per model and limit."""
    models = document["models"]
    pairs = [pair for model in models for pair in model["pairs"]]
    made = [pair for pair in pairs if "setting" in pair]
    refused = [pair for pair in pairs if "setting" not in pair]
    right = sum(not pair["num_fitting"] for pair in refused)
    slower = [pair["slower_than_best"] for pair in made if pair["slower_than_best"] is not None]
    ranks = ", ".join(f"{model['model']} {model['rank_correlation']:.2f}" for model in models)
    settings, known = (_span(values) for values in zip(*map(_counts, models), strict=True))
    lines = [
        f"{sum(pair['fits'] for pair in made)} of {len(made)} plans fit at the first try; of {len(refused)} "
        f"refused limits {right} hold nothing of the grid either. {sum(s <= 0.1 for s in slower)} of {len(slower)} are "
        f"within 10 % of the grid's best, the slowest {max(slower):+.0%}, the median "
        f"{statistics.median(slower):+.0%}; below zero, the plan is better than all of the grid. {_exactness(made)}"
        f"Rank correlation of predicted with measured times: {ranks} ({settings} settings each, {known} of them known "
        f"to the planner). torch {document['versions']['torch']}, one CPU thread, `{document['command']}`.",
        "",
        "| model | limit | plan | predicted peak | measured peak | step | best of the grid | step | plan against it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(model["model"], pair) for model in models for pair in model["pairs"])])


def _counts(model: dict[str, Any]) -> tuple[int, int]:
    return len(model["grid"]), model["num_calibrating"]


def _span(values: tuple[int, ...]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def _exactness(made: list[dict[str, Any]]) -> str:
    """How many plans keep the recipe's numbers, and whether the others had to change them, where that was recorded."""
    told = [pair for pair in made if "exact" in pair]
    if not told:
        return ""
    lossy = [pair for pair in told if not pair["exact"]]
    within = sum(is_within_tolerance(pair) for pair in lossy)
    return (
        f"{len(told) - len(lossy)} of {len(told)} plans keep the recipe's numbers; for {len(lossy) - within} of the "
        f"other {len(lossy)}, what keeps them in the grid doesn't fit or takes over {DEFAULT_TOLERANCE:.0%} longer. "
    )


def is_within_tolerance(pair: dict[str, Any]) -> bool:
    """Whether the fastest setting of the grid that keeps the numbers takes no longer than a plan may for that."""
    return pair["best_exact_s"] is not None and pair["best_exact_s"] <= (1 + DEFAULT_TOLERANCE) * pair["seconds"]


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
