"""The recipes that come with the package, by name, what is laid over one by `--with`, and the text of a plan's file."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

# In the same folder as this package, both in a checkout and in an installed wheel.
FOLDER = Path(__file__).resolve().parent.parent / "recipes"
SIZES = FOLDER / "sizes.json"
"""What `python -m benchmarks recipe_sizes` has written."""


class Task(NamedTuple):
    """What a recipe is for."""

    words: str
    sample: str
    """How large a sample is, of which a micro-batch has so many."""


TASKS = {
    "chat_full": Task("instruction tuning, all weights", "2,048 tokens"),
    "chat_lora": Task("instruction tuning, LoRA", "2,048 tokens"),
    "chat_qlora": Task("instruction tuning, QLoRA", "2,048 tokens"),
    "pretrain": Task("continued pre-training, all weights", "2,048 tokens"),
}
"""Recipes by what people come for."""


def available() -> dict[str, Path]:
    """Return names and files of all recipes: `quickstart`, `quick/gpt2xl`, ..."""
    files = sorted(FOLDER.rglob("*.yaml"))
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}


def describe(file: Path) -> str:
    """Return the first comment line of a recipe."""
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def resolve(name: str) -> str:
    """Return the file of a recipe given by name; the path of an existing file is returned unchanged."""
    if Path(name).expanduser().is_file():
        return str(Path(name).expanduser())
    recipes = available()
    key = name.removeprefix("recipes/").removesuffix(".yaml")
    if key in recipes:
        return str(recipes[key])
    closest = get_close_matches(key, recipes, n=3)
    known = f"Closest recipes: {', '.join(closest)}." if closest else "`memfit recipes` lists all."
    raise ValueError(f"`--config {name}` is neither a file nor a recipe. {known}")


def technique_config(name: str) -> dict[str, Any]:
    """Return the sections that lay a technique over a recipe."""
    from lightning_memfit.techniques.core.registry import techniques

    records = {technique.name: technique for technique in techniques()}
    if name not in records:
        words = get_close_matches(name, records, n=3) or list(records)
        raise ValueError(f"`--with {name}` is no technique. Closest: {', '.join(words)}.")
    return records[name].config()


def resolve_arguments(arguments: Sequence[str]) -> list[str]:
    """Replace the recipe name after every `--config` or `-c` by its file, and `--with NAME` by what it stands for."""
    resolved: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        option, equals, value = argument.partition("=")
        if option not in ("--config", "-c", "--with"):
            resolved.append(argument)
            continue
        value = value if equals else next(waiting, "")
        if value.startswith("{"):  # resolved already
            resolved.append(argument)
        elif option == "--with":
            resolved.append(f"--config={json.dumps(technique_config(value))}")
        else:
            resolved += [f"{option}={resolve(value)}"] if equals else [option, resolve(value)]
    return resolved


def configs_of(arguments: Sequence[str]) -> list[str]:
    """Return the files that `--config` and `-c` name, in no order; what `--with` stood for is no file."""
    named = [value for option, value in pairwise(arguments) if option in ("--config", "-c")]
    joined = [value for name, _, value in (one.partition("=") for one in arguments) if name in ("--config", "-c")]
    return [*named, *(one for one in joined if one and not one.startswith("{"))]


def without_config(arguments: Sequence[str], path: str) -> list[str]:
    """Return arguments without the `--config` or `-c` that names a file."""
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] in ("--config", "-c") and argument == path:
            kept.pop()
        elif argument != f"--config={path}":
            kept.append(argument)
    return kept


def overlay_text(summary: str, overlay: Mapping[str, Any]) -> str:
    """Return the YAML of a plan, with what it is in a comment."""
    import yaml

    text = f"# {summary}\n# Made by `memfit plan`; lay it over the recipe: fit --config RECIPE --config THIS.\n"
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return text + str(yaml.dump(dict(overlay), Dumper=dumper, sort_keys=False))
