"""What a recipe may look like, checked before anything of it is made: its YAML, its sections and its numbers.

`load_yaml` reads YAML in bounded time. `Sections` is the schema of a file's top level, and `TrainerNumbers` that of
what Lightning's Trainer would accept and then train with in silence. Sections below the top level belong to
classes, whose arguments the parser knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from jsonargparse import Namespace

_LARGEST_FILE = 4 << 20
"""Bytes; the recipes of this package have 3 KiB."""
_MOST_NODES = 100_000
"""Values of a recipe with every alias written out."""
_DEEPEST = 100
"""Levels of nested values; beyond about 1,000 the C parser overflows its stack."""

_OPENING = re.compile(r"[\[{]")


# --- YAML -------------------------------------------------------------------------------------------------------------


class UnreasonableYamlError(yaml.YAMLError):
    """YAML that says too much, or one thing twice."""


def bounded(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader of YAML that first refuses what would take too long, or has a key twice.

    Args:
        load: Loader of YAML that builds plain values only.
    """

    def checked(text: str) -> Any:
        check_yaml(text)
        return load(text)

    return checked


def check_yaml(text: str) -> None:
    """Refuse YAML that is too long, too deep, refers to itself, grows by its aliases, or has a key twice.

    Raises:
        UnreasonableYamlError: If it is one of these.
        yaml.YAMLError: If it can't be parsed.
    """
    if len(text) > _LARGEST_FILE:
        raise UnreasonableYamlError(f"it has {len(text):,} characters; a recipe has at most {_LARGEST_FILE:,}")
    if len(_OPENING.findall(text)) > _DEEPEST and _depth(text) > _DEEPEST:
        raise UnreasonableYamlError(f"its values are nested more than {_DEEPEST} levels deep")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        root = yaml.compose(text, Loader=loader)
    except RecursionError:
        raise UnreasonableYamlError("its values are nested too deeply") from None
    if root is not None and _num_nodes(root) > _MOST_NODES:
        raise UnreasonableYamlError(
            f"with its aliases written out it has more than {_MOST_NODES:,} values. Write out what is meant"
        )


def _depth(text: str) -> int:
    """Return how many brackets are open at once, at most, those in strings and comments included."""
    open_now = deepest = 0
    for character in text:
        if character in "[{":
            open_now += 1
            deepest = max(deepest, open_now)
        elif character in "]}":
            open_now -= 1
    return deepest


def _num_nodes(root: yaml.Node) -> int:
    """Return the number of values with every alias written out; a value counts once for each place it has.

    Raises:
        UnreasonableYamlError: If a value contains itself, is nested too deeply, or has a key twice.
    """
    known: dict[int, int] = {}
    inside: set[int] = set()
    # A node is visited before its children and once more after them, without recursion.
    waiting: list[tuple[yaml.Node, bool]] = [(root, False)]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            inside.discard(id(node))
            known[id(node)] = 1 + sum(known[id(child)] for child in _children(node))
        elif id(node) in inside:
            raise UnreasonableYamlError(f"a value contains itself{_line(node)}")
        elif id(node) not in known:
            inside.add(id(node))
            if len(inside) > _DEEPEST:
                raise UnreasonableYamlError(f"its values are nested more than {_DEEPEST} levels deep")
            _check_keys(node)
            waiting.append((node, True))
            waiting.extend((child, False) for child in _children(node) if id(child) not in known)
    return known[id(root)]


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _check_keys(node: yaml.Node) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if (key.tag, key.value) in seen:
            raise UnreasonableYamlError(f"the key `{key.value}` stands twice{_line(key)}. Keep one of them")
        seen.add((key.tag, key.value))


def _line(node: yaml.Node) -> str:
    return f" (line {node.start_mark.line + 1})" if node.start_mark is not None else ""


def read_text(path: Path, argument: str) -> str:
    """Return the text of a file that the user named.

    Args:
        path: The file.
        argument: What the user named it with, for messages.

    Raises:
        ValueError: If it can't be read, is too large, or no text in UTF-8.
    """
    shown = f"`{argument} {path}`"
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise ValueError(f"{shown} has {size:,} bytes; a recipe has at most {_LARGEST_FILE:,}. Name another file.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{shown} can't be read: {error.strerror}. Name another file.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown} is no text in UTF-8 (byte {error.start}). Save it as UTF-8.") from error


# --- the top level of a file ------------------------------------------------------------------------------------------


MADE_FOR = "made_for"
"""Section of a plan's file that says what it was made for (`made_for.py`)."""


class Sections(BaseModel):
    """Sections of a recipe; what is in them is checked against the classes that they configure."""

    model_config = ConfigDict(extra="forbid")

    seed_everything: Any = None
    memfit: Any = None
    made_for: dict[str, Any] | None = None
    model: Any = None
    data: Any = None
    trainer: Any = None
    ckpt_path: Any = None
    weights_only: Any = None
    verbose: Any = None
    return_predictions: Any = None


def check_recipe(path: Path, argument: str = "--config") -> dict[str, Any]:
    """Read a recipe's file and check its top level.

    Args:
        path: The file.
        argument: What the user named it with, for messages.

    Returns:
        The sections as plain values.

    Raises:
        ValueError: If it is no recipe.
    """
    text = read_text(path, argument)
    try:
        check_yaml(text)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"`{argument} {path}` is no YAML of a recipe: {_one_line(error)}.") from error
    if content is None:
        raise ValueError(f"`{argument} {path}` is empty. Name another file, or leave the option out.")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(
            f"`{argument} {path}` is no recipe: it must have sections such as `model:`, `data:` and `trainer:`."
        )
    # `trainer.max_steps: 3` and `callbacks+:` are jsonargparse's ways of writing.
    sections = {key.partition(".")[0].removesuffix("+"): value for key, value in content.items()}
    try:
        Sections.model_validate(sections)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        from .explain import closest  # knows all classes, and is needed for mistakes only

        value = sections[key]
        inside = f".{next(iter(value))}" if isinstance(value, dict) and value else ""
        words = closest(key, Sections.model_fields)
        raise ValueError(f"`{argument} {path}`: there is no option `{key}{inside}`. {words}") from None
    return content


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split()).rstrip(".")


# --- the Trainer's numbers --------------------------------------------------------------------------------------------


def _is_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


_LARGEST_SEED = 2**32 - 1
"""That numpy takes."""

Count = Annotated[int, BeforeValidator(_is_number), Field(ge=1)]
CountOrNone = Annotated[int, BeforeValidator(_is_number), Field(ge=0)]
CountOrEndless = Annotated[int, BeforeValidator(_is_number), Field(ge=-1)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TrainerNumbers(BaseModel):
    """Arguments of the Trainer that it stores without looking at them, or that end a run much later."""

    model_config = ConfigDict(extra="ignore")

    accumulate_grad_batches: Count | None = None
    num_nodes: Count | None = None
    max_epochs: CountOrEndless | None = None
    min_epochs: CountOrNone | None = None
    max_steps: CountOrEndless | None = None
    min_steps: CountOrNone | None = None
    log_every_n_steps: CountOrNone | None = None
    num_sanity_val_steps: CountOrEndless | None = None
    check_val_every_n_epoch: Count | None = None
    gradient_clip_val: Positive | None = None


def check_numbers(section: Namespace | Mapping[str, Any]) -> None:
    """Refuse values of the Trainer's arguments, and a seed, that would be taken without a word or end in other words.

    Args:
        section: What was parsed for a command, with `trainer` and `seed_everything`.

    Raises:
        ValueError: If a number is out of range, or there is no Trainer.
    """
    trainer, seed = section.get("trainer"), section.get("seed_everything")
    if "trainer" in section and trainer is None:
        raise ValueError("`trainer: null` is no section with arguments of the Trainer. Leave it out for its defaults.")
    if type(seed) is int and not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(
            f"`seed_everything={seed}` must lie between 0 and {_LARGEST_SEED}. Change it; `true` draws one."
        )
    trainer = trainer or {}
    devices = str(trainer.get("devices")).strip()
    if devices.removeprefix("-").isdigit() and int(devices) < -1:
        raise ValueError(
            f"`trainer.devices={devices}` must be a number of devices, a list of their numbers, or -1 for all."
        )
    values = {name: trainer[name] for name in TrainerNumbers.model_fields if name in trainer}
    try:
        TrainerNumbers.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        wanted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise ValueError(f"`trainer.{name}={values[name]}` must be {wanted}. Change it, or leave it out.") from None


def check_finite(values: Any, key: str = "") -> None:
    """Refuse NaN anywhere in a configuration: it passes every comparison with a bound.

    Raises:
        ValueError: If there is one.
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            check_finite(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, (list, tuple)):
        for value in values:
            check_finite(value, key)
    elif isinstance(values, float) and math.isnan(values):
        raise ValueError(f"`{key}={values}` is no number. Give one.")
