"""Parsing that several commands share: our options apart from the recipe's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

NAMED_OPTIONS = (
    "sequence_length",
    "precision",
    "optimizer",
    "checkpointing",
    "attention",
    "accumulate_grad_batches",
    "technique",
)
"""Options that a recipe sets itself."""


def split_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate our options from those of the recipe, keeping the order of each.

    `--config` belongs to both. After a `--config`, `--model` belongs to the recipe.
    """
    takes_value = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    from_recipe = any(argument.partition("=")[0] in ("--config", "-c") for argument in argv)
    ours: list[str] = []
    theirs: list[str] = []
    place: list[list[str]] = [theirs]
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            for target in place:
                target.append(argument)
            place = [theirs]
            continue
        name = f"--{name[2:].replace('_', '-')}" if name.startswith("--") and "." not in name else name
        if name in ("--config", "-c"):
            place = [ours, theirs]
        elif name in takes_value and not (from_recipe and name == "--model"):
            place = [ours]
        else:
            place, name = [theirs], argument.partition("=")[0]
        for target in place:
            target.append(f"{name}{equals}{value}")
        if equals or (place == [ours] and not takes_value[name]):
            place = [theirs]
    return ours, theirs


def positive(text: str) -> int:
    """Parse a number of at least 1, as the type of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number
