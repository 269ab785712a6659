"""`memfit recipes`: list the recipes that come with the package, or copy one out."""

import argparse
import shutil
from pathlib import Path

from .recipe_files import available, describe, resolve


def main(argv: list[str]) -> int:
    """List recipes, or copy one; files are never overwritten."""
    parser = argparse.ArgumentParser(prog="memfit recipes", description="List the recipes, or copy one to change it.")
    actions = parser.add_subparsers(dest="action", metavar="{list,copy}")
    actions.add_parser("list", help="names and what they are for (the default)")
    copy = actions.add_parser("copy", help="copy a recipe into a folder")
    copy.add_argument("name", help="for example quickstart or fragments/wandb")
    copy.add_argument("folder", nargs="?", metavar="FOLDER", help="where to put it (default: here)")
    copy.add_argument("--to", metavar="FOLDER", help="the same, as an option")
    arguments = parser.parse_args(argv)
    if arguments.action == "copy":
        if arguments.to is not None and arguments.folder is not None:
            raise ValueError(f"`recipes copy {arguments.name}`: FOLDER and `--to` name two folders. Drop one.")
        return _copy(arguments.name, Path(arguments.to or arguments.folder or "."))
    recipes = available()
    width = max(map(len, recipes))
    for name, file in recipes.items():
        print(f"{name:<{width}}  {describe(file)}")
    return 0


def _copy(name: str, folder: Path) -> int:
    source = Path(resolve(name))
    target = folder / source.name
    if target.exists():
        raise ValueError(f"{str(target)!r} exists already. Name another folder after it: nothing is overwritten.")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(target)
    return 0
