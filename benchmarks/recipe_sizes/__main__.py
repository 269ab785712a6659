"""Write `recipes/sizes.json`: the largest micro-batch of each recipe, with each model, on cards of three sizes.

    python -m benchmarks.recipe_sizes              # what is missing; delete the file to begin anew
    python -m benchmarks.recipe_sizes --plans      # and plans for these cards, which take minutes each

Nothing is trained or downloaded: the figures are those of `memfit estimate`, from one trace for each row, and of
`memfit plan`. Both are written into docs/guides/chats.md.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.marks import insert
from cli.main import main as memfit
from cli.recipe_files import FOLDER, SIZES, TASKS
from lightning_memfit.measure.report import versions

DEVICES = ("12GiB", "24GiB", "80GiB")
HOST_MEMORY = "64GiB"
ROOT = Path(__file__).parents[2]
PLANS = ROOT / "benchmarks" / "results" / "recipe_plans.json"
PAGES: Mapping[Path, tuple[str, ...]] = {
    ROOT / "docs" / "guides" / "chats.md": ("chat_full", "chat_lora", "chat_qlora", "pretrain"),
}
"""Pages that show what recipes need, and the recipes of each, in this order."""
Row = Mapping[str, Any]


def models() -> list[str]:
    """Names of the recipes that lay a model over another one, the one that the recipes name themselves first."""
    names = sorted(f"models/{file.stem}" for file in (FOLDER / "models").glob("*.yaml"))
    return sorted(names, key=lambda name: name != "models/qwen3")


def wanted() -> list[tuple[str, str]]:
    """Recipes of `TASKS`, each with every model that can be laid over it."""
    return list(itertools.product(TASKS, models()))


def estimate(recipe: str, model: str, device: str) -> dict[str, Any]:
    """Return what `memfit estimate --json` prints.

    Raises:
        RuntimeError: If it can't tell.
    """
    return _printed(["estimate", "--config", recipe, "--config", model, "--device", device])


def _printed(arguments: list[str]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = memfit([*arguments, "--json"])
    if code not in (0, 1):
        raise RuntimeError(f"`memfit {' '.join(arguments)}` ended with {code}")
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def row_of(recipe: str, model: str) -> dict[str, Any]:
    """Return a row of the file: the model's name, and the largest micro-batch by device, 0 where not even one fits."""
    found = {device: estimate(recipe, model, device) for device in DEVICES}
    first = found[DEVICES[0]]
    return {
        "recipe": recipe,
        "model": model,
        "num_parameters": first["num_parameters"],
        "sequence_length": first["sequence_length"],
        "largest_micro_batch": {device: one["largest_micro_batch_size"] or 0 for device, one in found.items()},
        "versions": first["profile"]["versions"],
    }


def plan_of(recipe: str, device: str) -> dict[str, Any]:
    """Return a row of the file of plans: what `memfit plan` chooses for a recipe with its own model."""
    found = _printed(["plan", "--config", recipe, "--device", device, "--host-memory", HOST_MEMORY])
    return {"recipe": recipe, "device": device, **{name: found[name] for name in ("fits", "summary", "batch_size")}}


def page(recipes: Sequence[str], rows: Sequence[Row], plans: Sequence[Row], text: str) -> str:
    """Write the tables of estimates and plans of some recipes into the text of their page."""
    cards = [device.replace("GiB", " GB") for device in DEVICES]
    own = [row for row in rows if row["recipe"] in recipes]
    names = sorted({row["model"] for row in own})
    (sample,) = {TASKS[recipe].sample for recipe in recipes}
    lines = [
        f"Largest micro-batch in samples of {sample} on cards of {', '.join(cards)}, as `memfit estimate` predicts it; "
        "-: not one sample fits.",
        "",
        f"| recipe | {' | '.join(f'`{name}`' for name in names)} |",
        f"|---{'|---' * len(names)}|",
    ]
    found = {(row["recipe"], row["model"]): row["largest_micro_batch"] for row in own}
    for recipe in recipes:
        cells = [", ".join(str(found[recipe, name][device] or "-") for device in DEVICES) for name in names]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    device = DEVICES[1]
    lines += [
        "",
        f"What `memfit plan` chooses on a card of {cards[1]} for a recipe's batch and model, beside "
        f"{HOST_MEMORY.replace('GiB', ' GiB')} of host memory (other cards: `{PLANS.relative_to(ROOT)}`):",
        "",
    ]
    planned = {(row["recipe"], row["device"]): row["summary"] for row in plans}
    lines += [f"- `{recipe}`: {planned[recipe, device].partition(': needs')[0]}" for recipe in recipes]
    return insert(text, "sizes", "\n".join(lines))


def add_plans() -> None:
    """Add the missing plans, one at a time."""
    rows = json.loads(PLANS.read_text())["rows"] if PLANS.exists() else []
    wanted_plans = [(recipe, device) for recipe in reversed(TASKS) for device in DEVICES]
    for recipe, device in wanted_plans:
        if any((row["recipe"], row["device"]) == (recipe, device) for row in rows):
            continue
        rows.append(plan_of(recipe, device))
        document = {"command": "python -m benchmarks.recipe_sizes --plans", "versions": versions(), "rows": rows}
        PLANS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(rows[-1]["recipe"], device, rows[-1]["summary"], file=sys.stderr)


def write_pages() -> None:
    """Write the pages from the files."""
    rows, plans = (json.loads(file.read_text())["rows"] for file in (SIZES, PLANS))
    for file, recipes in PAGES.items():
        file.write_text(page(recipes, rows, plans, file.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Add the missing rows, one at a time, and write the pages."""
    rows = json.loads(SIZES.read_text())["rows"] if SIZES.exists() else []
    for recipe, model in wanted():
        if any((row["recipe"], row["model"]) == (recipe, model) for row in rows):
            continue
        row = row_of(recipe, model)
        rows = sorted([*rows, row], key=lambda row: (row["recipe"], row["model"]))
        SIZES.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(row["recipe"], row["model"], row["largest_micro_batch"], file=sys.stderr)
    if sys.argv[1:] == ["--plans"]:
        add_plans()
    write_pages()


if __name__ == "__main__":
    main()
