"""What a recipe may look like, checked before anything of it is made: its YAML, its sections and the Trainer's numbers.

Sections below the top level belong to classes, whose arguments the parser knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from jsonargparse import Namespace

MADE_FOR = "made_for"
"""Section of a plan's file that says what it was made for (`made_for.py`)."""

SECTIONS = (
    *("seed_everything", MADE_FOR, "model", "data", "trainer"),
    *("ckpt_path", "weights_only", "verbose", "return_predictions"),
)
"""Sections of a recipe."""

_LEAST = {
    "accumulate_grad_batches": 1,
    "num_nodes": 1,
    "max_epochs": -1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "log_every_n_steps": 0,
    "num_sanity_val_steps": -1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
}
"""The least that arguments of the Trainer may be, which stores them without a look or ends a run by them much later."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice, of which YAML's loaders take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Make a dictionary."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"the key `{key.value}` stands twice (line {line}). Keep one of them")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def check_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe's file and check its top level."""
    shown = f"`--config {path}`"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # nosec B506  # a SafeLoader
    except OSError as error:
        raise ValueError(f"{shown} can't be read: {error.strerror}. Name another file.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown} is no text in UTF-8 (byte {error.start}). Save it as UTF-8.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{shown} is no YAML of a recipe: {_one_line(error)}.") from error
    if content is None:
        raise ValueError(f"{shown} is empty. Name another file, or leave the option out.")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{shown} is no recipe: it must have sections such as `model:`, `data:` and `trainer:`.")
    for key, value in content.items():
        section = key.partition(".")[0].removesuffix("+")  # `trainer.max_steps: 3` and `callbacks+:` are jsonargparse's
        if section not in SECTIONS:
            from .explain import closest  # knows all classes, and is needed for mistakes only

            inside = f".{next(iter(value))}" if isinstance(value, dict) and value else ""
            raise ValueError(f"{shown}: there is no option `{section}{inside}`. {closest(section, SECTIONS)}")
    return content


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split()).rstrip(".")


def check_numbers(section: Namespace | Mapping[str, Any]) -> None:
    """Refuse values of the Trainer's arguments that it would take without a word."""
    trainer = section.get("trainer")
    if "trainer" in section and trainer is None:
        raise ValueError("`trainer: null` is no section with arguments of the Trainer. Leave it out for its defaults.")
    for name, least in _LEAST.items():
        value = (trainer or {}).get(name)
        if isinstance(value, (int, float)) and (isinstance(value, bool) or not value >= least):  # NaN is not, either
            raise ValueError(
                f"`trainer.{name}={value}` must be a number greater than or equal to {least}. Change it, or leave it "
                "out."
            )
