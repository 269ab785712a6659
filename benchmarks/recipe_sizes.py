"""The largest micro-batch of each recipe with each model on cards of three sizes, and what is planned for these cards.

Nothing is trained or downloaded: the figures of `recipe_sizes` are those of `memfit estimate`, from one trace for each
row, and those of `recipe_plans` of `memfit plan`, which takes minutes each.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from benchmarks.runner import Benchmark, Named, Options, Row, Stage, read
from benchmarks.text import table
from cli.main import main as memfit
from cli.recipe_files import FOLDER, SIZES, TASKS

DEVICES = ("12GiB", "24GiB", "80GiB")
HOST_MEMORY = "64GiB"
PLANS = "recipe_plans.json"
RECIPES = ("chat_full", "chat_lora", "chat_qlora", "pretrain")
"""Those of the page on chats, in this order."""


def models() -> list[str]:
    """Names of the recipes that lay a model over another one, the one that the recipes name themselves first."""
    names = sorted(f"models/{file.stem}" for file in (FOLDER / "models").glob("*.yaml"))
    return sorted(names, key=lambda name: name != "models/qwen3")


def case_of(recipe: str, other: str) -> Named:
    """A recipe, and a model that is laid over it or a device."""
    return Named(f"{recipe}, {other}", (recipe, other))


def _printed(arguments: list[str]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = memfit([*arguments, "--json"])
    if code not in (0, 1):
        raise RuntimeError(f"`memfit {' '.join(arguments)}` ended with {code}")
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def size(case: Named, options: Options, row: Row) -> Row:
    """The model's parameters, and the largest micro-batch by device, 0 where not even one fits.

    Raises:
        RuntimeError: If an estimate can't tell.
    """
    recipe, model = case.of
    configs = ["--config", recipe, "--config", model]
    found = {device: _printed(["estimate", *configs, "--device", device]) for device in DEVICES}
    first = found[DEVICES[0]]
    return {
        "recipe": recipe,
        "model": model,
        "num_parameters": first["num_parameters"],
        "sequence_length": first["sequence_length"],
        "largest_micro_batch": {device: one["largest_micro_batch_size"] or 0 for device, one in found.items()},
        "versions": first["profile"]["versions"],
    }


def plan(case: Named, options: Options, row: Row) -> Row:
    """What is planned for a recipe with its own model."""
    recipe, device = case.of
    found = _printed(["plan", "--config", recipe, "--device", device, "--host-memory", HOST_MEMORY])
    kept = {name: found[name] for name in ("fits", "summary", "batch_size")}
    return {"recipe": recipe, "device": device, **kept}


def text(document: dict[str, Any]) -> str:
    """Tables of estimates, and what is planned for the card in the middle."""
    cards = [device.replace("GiB", " GB") for device in DEVICES]
    found = {(row["recipe"], row["model"]): row["largest_micro_batch"] for row in document["rows"]}
    names = sorted({model for recipe, model in found if recipe in RECIPES})
    (sample,) = {TASKS[recipe].sample for recipe in RECIPES}
    lines = [
        [f"`{recipe}`", *(", ".join(str(found[recipe, name][one] or "-") for one in DEVICES) for name in names)]
        for recipe in RECIPES
    ]
    planned = {(row["recipe"], row["device"]): row["summary"] for row in read(PLANS)["rows"]}
    return "\n".join(
        [
            f"Largest micro-batch in samples of {sample} on cards of {', '.join(cards)}, as `memfit estimate` predicts "
            "it; -: not one sample fits.",
            "",
            table(["recipe", *(f"`{name}`" for name in names)], lines),
            "",
            f"What `memfit plan` chooses on a card of {cards[1]} for a recipe's batch and model, beside "
            f"{HOST_MEMORY.replace('GiB', ' GiB')} of host memory (other cards: `benchmarks/results/{PLANS}`):",
            "",
            *(f"- `{recipe}`: {planned[recipe, DEVICES[1]].partition(': needs')[0]}" for recipe in RECIPES),
        ]
    )


def _in_order(rows: list[Row], options: Options) -> Row:
    return {"rows": sorted(rows, key=lambda row: (row["recipe"], row["model"]))}


BENCHMARKS = {
    "recipe_sizes": Benchmark(
        str(SIZES),
        lambda options: [case_of(recipe, model) for recipe in TASKS for model in models()],
        (Stage(size, timed=False),),
        _in_order,
        lambda row: str(row["largest_micro_batch"]),
    ),
    "recipe_plans": Benchmark(
        PLANS,
        lambda options: [case_of(recipe, device) for recipe in TASKS for device in DEVICES],
        (Stage(plan, timed=False),),
        say=lambda row: row["summary"],
    ),
}
