"""Write `recipes/sizes.json`: the largest micro-batch of each recipe, with each model, on cards of three sizes.

    python -m benchmarks.recipe_sizes              # what is missing; delete the file to begin anew

Nothing is trained or downloaded: the figures are those of `memfit estimate`, from one trace for each row.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

import yaml

from cli.main import main as memfit
from cli.recipe_files import FOLDER, SIZES, TASKS

DEVICES = ("12GiB", "24GiB", "80GiB")


def models() -> list[str]:
    """Names of the recipes that lay a model over another one, the one that the recipes name themselves first."""
    names = sorted(f"models/{file.stem}" for file in (FOLDER / "models").glob("*.yaml"))
    return sorted(names, key=lambda name: name != "models/qwen3")


def wanted() -> list[tuple[str, str | None]]:
    """Each recipe with each model that is laid over it; None for recipes that have their own."""
    return [(recipe, model) for recipe, task in TASKS.items() for model in (models() if task.takes_model else [None])]


def own_model(recipe: str) -> str:
    """The model that a recipe names itself."""
    text = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text(encoding="utf-8"))
    return str(text["model"]["init_args"].get("pretrained", "random weights"))


def estimate(recipe: str, model: str | None, device: str) -> dict[str, Any]:
    """Return what `memfit estimate --json` prints.

    Raises:
        RuntimeError: If it can't tell.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        overlay = ["--config", model] if model else []
        code = memfit(["estimate", "--config", recipe, *overlay, "--device", device, "--json"])
    if code not in (0, 1):
        raise RuntimeError(f"estimate of {recipe} with {model} ended with {code}")
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def row_of(recipe: str, model: str | None) -> dict[str, Any]:
    """Return a row of the file: the model's name, and the largest micro-batch by device, 0 where not even one fits."""
    found = {device: estimate(recipe, model, device) for device in DEVICES}
    first = found[DEVICES[0]]
    return {
        "recipe": recipe,
        "model": model or own_model(recipe),
        "num_parameters": first["num_parameters"],
        "sequence_length": first["sequence_length"],
        "largest_micro_batch": {device: one["largest_micro_batch_size"] or 0 for device, one in found.items()},
        "versions": first["profile"]["versions"],
    }


def main() -> None:
    """Add the missing rows, one at a time."""
    rows = json.loads(SIZES.read_text())["rows"] if SIZES.exists() else []
    for recipe, model in wanted():
        if any((row["recipe"], row["model"]) == (recipe, model or own_model(recipe)) for row in rows):
            continue
        row = row_of(recipe, model)
        rows = sorted([*rows, row], key=lambda row: (row["recipe"], row["model"]))
        SIZES.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(row["recipe"], row["model"], row["largest_micro_batch"], file=sys.stderr)


if __name__ == "__main__":
    main()
