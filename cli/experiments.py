"""The experiments of a checkout, by name, and the recipes that their rows name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_memfit.bench.experiment import closest

from .recipe_files import resolve

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "experiments"
"""Only a checkout has it; an installed package takes files."""


def experiment_file(name: str) -> Path:
    """The YAML file of an experiment given by name or path.

    Raises:
        ValueError: If there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    files = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}
    if name in files:
        return files[name]
    hint = closest(name, list(files)) if files else "This installation has none by name: give a YAML file."
    raise ValueError(f"`--experiment {name}` is neither a file nor an experiment. {hint}")


def read_recipe(name: str) -> Mapping[str, Any]:
    """The configuration of a recipe, fragment or file.

    Raises:
        ValueError: If there is none of that name.
    """
    import yaml

    try:
        path = Path(resolve(name))
    except ValueError as error:
        raise ValueError(str(error).replace("`--config", "layer `", 1)) from None
    content: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def worker_command() -> tuple[str, ...]:
    """How to start a measured run in a process of its own."""
    import sys

    return (sys.executable, "-m", f"{__package__}.bench_worker")
