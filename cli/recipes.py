"""`memfit recipes`: list the recipes that come with the package, or copy one out."""

import json
import shutil
from pathlib import Path
from typing import Any

from .arguments import command_parser
from .recipe_files import SIZES, TASKS, available, describe, resolve


def main(argv: list[str]) -> int:
    """List recipes and techniques, or copy a recipe; files are never overwritten."""
    parser = command_parser("recipes", "List the recipes, or copy one to change it.")
    actions = parser.add_subparsers(dest="action", metavar="{list,copy}")
    actions.add_parser("list", help="names and what they are for (the default)")
    copy = actions.add_parser("copy", help="copy a recipe into a folder")
    copy.add_argument("name", help="for example quickstart or fragments/wandb")
    copy.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="where to put it (default: here)")
    arguments = parser.parse_args(argv)
    if arguments.action == "copy":
        return _copy(arguments.name, Path(arguments.folder))
    recipes = available()
    width = max(map(len, recipes))
    for name, file in recipes.items():
        print(f"{name:<{width}}  {describe(file)}")

    from lightning_memfit.techniques.core.registry import techniques

    print("\nTechniques, each of which `--with NAME` lays over a recipe:\n")
    for technique in techniques():
        print(f"{technique.name:<{width}}  {technique.summary}")
    print()
    print(*by_task_and_memory(json.loads(SIZES.read_text(encoding="utf-8"))["rows"]), sep="\n")
    return 0


def by_task_and_memory(rows: list[dict[str, Any]]) -> list[str]:
    """Return lines of a table: which micro-batch of which recipe fits which card."""
    devices = list(rows[0]["largest_micro_batch"])
    cells = [["task", "recipe", "model", "sample", *(device.replace("GiB", " GB") for device in devices)]]
    for row in sorted(rows, key=lambda row: (list(TASKS).index(row["recipe"]), row["num_parameters"])):
        sizes = [str(row["largest_micro_batch"][device] or "-") for device in devices]
        task = TASKS[row["recipe"]]
        cells.append([task.words, row["recipe"], row["model"], task.sample, *sizes])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if at < 4 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return [
        "Largest micro-batch in samples by memory of the card, as `memfit estimate` predicts it:",
        "",
        *lines,
        "",
        "-: not one sample fits. `memfit plan --config RECIPE --config models/NAME --device 12GiB` looks for a way.",
    ]


def _copy(name: str, folder: Path) -> int:
    source = Path(resolve(name))
    target = folder / source.name
    if target.exists():
        raise ValueError(f"{str(target)!r} exists already. Name another folder after it: nothing is overwritten.")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(target)
    return 0
