"""How good plans are, beside the grid's best."""

import statistics
from typing import Any

from lightning_memfit.planner.workload import DEFAULT_TOLERANCE


def render(document: dict[str, Any]) -> str:
    """Sentences with the totals; the rows are in the file."""
    models = document["models"]
    pairs = [pair for model in models for pair in model["pairs"]]
    made = [pair for pair in pairs if "setting" in pair]
    refused = [pair for pair in pairs if "setting" not in pair]
    right = sum(not pair["num_fitting"] for pair in refused)
    slower = [pair["slower_than_best"] for pair in made if pair["slower_than_best"] is not None]
    errors = [row["predicted_s"] / row["seconds"] - 1 for model in models for row in model["grid"]]
    largest = max(errors, key=abs)
    names = ", ".join(model["model"] for model in models)
    none_fits = f"Of {len(refused)} refused limits, {right} hold no setting of the grid either. " if refused else ""
    return (
        f"{names}: {sum(pair['fits'] for pair in made)} of {len(made)} plans fit at the first try. {none_fits}"
        f"{sum(s <= 0.1 for s in slower)} of {len(slower)} are within 10 % of the grid's best: the slowest "
        f"{max(slower):+.0%}, the median {statistics.median(slower):+.0%} (below zero: faster). {_exactness(made)}"
        f"Times of {len(errors)} settings, of which no step was known: median error "
        f"{statistics.median(map(abs, errors)):.1%}, largest {largest:+.1%} (`{document['command']}`, torch "
        f"{document['versions']['torch']}, one CPU thread)."
    )


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
