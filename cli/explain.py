"""Say in one line what is wrong with a configuration that the parser refuses, and which valid names are closest.

The parser's message lists every type that it tried. What is wrong is found anew instead, from the names and values that
were given and the signatures of the classes that they are for.
"""

import argparse
import inspect
import os
import traceback
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import yaml
from jsonargparse import ArgumentParser

import lightning_memfit

_CLASSES = ("model", "data", "trainer.callbacks", "trainer.logger")
"""Options that take a class by its bare name or path."""

_PART = object()
"""Stands for the value of an argument of which a part is given: `--model.config.n_layer=2`."""

_MOST_SHOWN = 400
"""Characters of the parser's own message, where nothing was found, and a tenth of it of a value."""


def explain(
    error: Exception,
    parser: argparse.ArgumentParser,
    recipes: Sequence[Mapping[str, Any]] = (),
    arguments: Sequence[str] = (),
) -> str:
    """Return what is wrong and what was probably meant."""
    given = [*(pair for recipe in recipes for pair in _sections(recipe)), *_options(arguments)]
    if arguments and arguments[-1].endswith(".help"):
        return f"`{arguments[-1]}` needs the name of a class, such as {', '.join(lightning_memfit.__all__)}."
    for told in _mistakes(given, set(options_of(parser))):
        return told
    message = " ".join(str(error).split())
    return message if len(message) <= _MOST_SHOWN else f"{message[:_MOST_SHOWN]} ..."


def _sections(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield options as a command line names them, such as `trainer.max_steps`, with their values."""
    for name, value in recipe.items():
        if name == "trainer" and isinstance(value, Mapping):
            yield from ((f"trainer.{key}".removesuffix("+"), item) for key, item in value.items())
        else:
            yield name.removesuffix("+"), value


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name == "--config":
            continue
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        text = value if equals else following
        yield name[2:].removesuffix("+"), _plain(text) if text[:1] in ("{", "[") else text


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _mistakes(given: Sequence[tuple[str, Any]], valid: set[str]) -> Iterator[str]:
    """Yield what is said of options, classes and arguments that don't exist, then of values of another type."""
    from lightning.pytorch import Trainer

    of_trainer, values = arguments_of(Trainer), []
    for key, value in given:
        name = key.removeprefix("trainer.")
        if name != key and not _takes(of_trainer.get(name), value):
            values.append(f"`{key}={_shown(value)}` must be {_words(of_trainer[name])}. Change it, or leave it out.")
    for where, path, arguments in _of_classes(given, valid):
        if path is None:
            yield f"there is no option `{where}`. {_closest_option(where, valid)}"
            continue
        cls, failure = _find_class(path)
        if failure is not None:
            yield f"`{where}`: {failure}"
        known, named = arguments_of(cls), path.rpartition(".")[2]
        for name, value in arguments.items():
            if known and name not in known:
                yield f"`{where}`: {named} has no argument `{name}`. {closest(str(name), known)}"
            elif not _takes(known.get(name), value):
                values.append(f"`{where}`: `{named}.{name}={_shown(value)}` must be {_words(known[name])}. Change it.")
    yield from values


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN // 10 else f"{text[: _MOST_SHOWN // 10]}..."


def _of_classes(
    given: Iterable[tuple[str, Any]], valid: set[str]
) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yield each class that is named, where, and with which arguments; no class, and a value, for unknown options."""
    last: dict[str, str] = {}
    for key, value in given:
        option = next((name for name in _CLASSES if key == name or key.startswith(f"{name}.")), key)
        if not any(key in (name, "trainer") or key.startswith(f"{name}.") for name in valid):
            yield key, None, value
        elif option == key:
            found = list(_specs(key, value))
            yield from found
            last |= {where: path for where, path, _ in found if where == key}
        elif option in last:
            name, dot, _ = key.removeprefix(f"{option}.").removeprefix("init_args.").partition(".")
            if name not in ("help", "class_path"):
                yield option, last[option], {name: _PART if dot else value}


def _specs(where: str, value: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield every class in a value, outer ones first."""
    if isinstance(value, str):
        if where in _CLASSES and value.replace(".", "").replace("_", "").isalnum() and value[0].isalpha():
            yield where, value, {}
    elif isinstance(value, Mapping):
        arguments = value.get("init_args") or {}
        if isinstance(value.get("class_path"), str) and isinstance(arguments, Mapping):
            yield where, value["class_path"], arguments
        for name, item in value.items():
            if not isinstance(item, str):
                yield from _specs(where if name == "init_args" else f"{where}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _specs(where, item)


def _find_class(path: str) -> tuple[Any, str | None]:
    """Return a class by its path or bare name, and what is wrong if there is none."""
    module, _, name = path.rpartition(".")
    if not module:
        found = _by_name().get(name)
        return found, None if found is not None else f"there is no class `{path}`. {_closest_class(name)}"
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            return None, _raised(path, error)
        if find_spec(error.name.partition(".")[0]) is None:
            return None, f"there is no module `{error.name}` for the class `{path}`, installed or in {os.getcwd()}."
        found = None
    except Exception as error:
        return None, _raised(path, error)
    return found, None if found is not None else f"there is no class `{path}`. {_closest_class(name)}"


def _raised(class_path: str, error: Exception) -> str:
    """Name the error that a module raised while it was imported, and its line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}:{last.lineno})"  # it names its own
    return f"`{class_path}` can't be imported: {type(error).__name__}: {error}{place}."


def import_public_names() -> None:
    """Import all public classes of the package, so that YAML and options take `MicroBatching` for its full path.

    jsonargparse finds a bare class name, and lists classes in `--trainer.callbacks.help`, among the subclasses that are
    imported. Strategies register the names that `trainer.strategy` takes.
    """
    for name in lightning_memfit.__all__:
        getattr(lightning_memfit, name)


def closest(name: str, valid: Iterable[str]) -> str:
    """Return a sentence with the valid names closest to one, or all of them."""
    names = sorted(valid)
    return f"Closest: {', '.join(get_close_matches(name, names, n=3, cutoff=0.5) or names)}."


def _closest_option(key: str, valid: set[str]) -> str:
    """Compare whole keys, then level by level, because the parser does not know the options of a class."""
    root = key.partition(".")[0]
    roots = {name.partition(".")[0] for name in valid}
    if root not in roots:
        return closest(root, roots)
    return closest(key, {name for name in valid if name.startswith(f"{root}.")} or roots)


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the names of a parser's options, such as `trainer.max_steps`, those of its subcommands included."""
    for action in parser._actions:
        if isinstance(action.choices, dict):  # subcommands
            for subparser in action.choices.values():
                yield from options_of(subparser)
        elif action.option_strings and action.dest != "trainer":  # a whole section, of whose keys the others are
            yield action.dest


def arguments_of(cls: Any) -> dict[str, Any]:
    """Return a class's arguments and their types, with those of its bases if it passes `**kwargs` on.

    It is empty for what is no class; a type is `Any` where there is none, or none that can be read.
    """
    found: dict[str, Any] = {}
    for base in inspect.getmro(cls) if inspect.isclass(cls) else ():
        if "__init__" not in vars(base):
            continue
        init = vars(base)["__init__"]
        try:
            hints = typing.get_type_hints(init)
        except Exception:  # names that exist for type checkers alone
            hints = {}
        parameters = list(inspect.signature(init).parameters.values())[1:]
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = {one.name: hints.get(one.name, Any) for one in parameters if one.kind not in kinds} | found
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found


def _takes(hint: Any, value: Any) -> bool:
    """Whether the parser takes a value for a type; True where that can't be told, or another class is to be made."""
    if value is _PART or hint in (None, Any) or any(_specs("", value)):
        return True
    probe = ArgumentParser(exit_on_error=False)
    try:
        probe.add_argument("--value", type=hint)
    except ValueError:  # a type that it doesn't know
        return True
    try:
        probe.parse_object({"value": value})
    except argparse.ArgumentError:
        return False
    return True


def _words(hint: Any) -> str:
    """Return a type as YAML's words: `int or null`, `'simple' or 'advanced'`."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, parts)))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, parts))
    named = {type(None): "null", int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return named.get(hint) or (hint.__name__ if inspect.isclass(hint) else str(hint).replace("typing.", ""))


def _closest_class(name: str) -> str:
    import_public_names()  # only imported classes can be suggested
    paths = {name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in _by_name().items()}
    matches = get_close_matches(name, paths, n=3, cutoff=0.5)
    if matches:
        return f"Closest: {', '.join(paths[match] for match in matches)}."
    return "Give its full import path, such as `lightning_memfit.models.CausalLM`."


def _by_name() -> dict[str, type]:
    """Return all classes of modules, data, callbacks and loggers that are imported."""
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.loggers import Logger

    found: dict[str, type] = {}
    for base in (Callback, LightningDataModule, LightningModule, Logger):
        for cls in _subclasses(base):
            found.setdefault(cls.__name__, cls)
    return found


def _subclasses(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        if not cls.__name__.startswith("_"):
            yield cls
        yield from _subclasses(cls)
