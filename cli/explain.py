"""Shorten jsonargparse's messages about a wrong configuration, and add the closest valid names.

Written for the messages of jsonargparse 4.40 to 4.53; messages that are not recognized are passed on unchanged.
"""

import argparse
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import lightning_memfit

_PARSER_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"')
_CLASS_OPTION = re.compile(r"given class_path '(?P<path>[^']+)':\s*Option '(?P<key>[^']+)' is not accepted")
_CLASS_PATH = re.compile(r"class_path '(?P<path>[^']+)':\s*(module '[\w.]+' has no attribute|No module named)")
_SHORT_NAME = re.compile(r"Expected a dot import path string: (?P<name>\w+)")
_COMMAND_LINE = re.compile(r"[Uu]nrecognized arguments: --(?P<key>[\w.]+)")
_HELP_OPTION = re.compile(r"argument --(?P<key>trainer\.callbacks)\.help: expected one argument")
_NAMED_CLASS = (
    re.compile(r"class_path['\"]?\s*[:=]?\s*['\"](?P<path>[\w.]+)['\"]"),
    re.compile(r"Given value: (?P<path>[\w.]+)\s*$", re.MULTILINE),
    re.compile(r"Expected a path but (?P<path>[\w.]+) either"),
)
_MISSING = re.compile(r"^[\s-]*(?P<told>\S.* needs [\w.]+: pip install .+?)$", re.MULTILINE)
_TOP_OPTION = re.compile(r"(?:does not accept option|Option) '(?P<key>[\w.]+)'")


def explain(message: str, parser: argparse.ArgumentParser) -> str:
    """Return what is wrong and what was probably meant.

    Args:
        message: Message of jsonargparse.
        parser: The parser, which knows the valid names.
    """
    if match := _MISSING.search(message):
        return match["told"]
    found = _PARSER_KEY.search(message)
    where = f"`{found['key']}`: " if found else ""
    paths = {match["path"]: None for pattern in _NAMED_CLASS for match in pattern.finditer(message)}
    for path in paths:
        if (failure := _import_failure(path)) is not None:
            return f"{where}{failure}"
    if match := _CLASS_OPTION.search(message):
        name = match["path"].rpartition(".")[2]
        return f"{where}{name} has no argument `{match['key']}`. {closest(match['key'], _arguments(match['path']))}"
    if match := _CLASS_PATH.search(message):
        return f"{where}there is no class `{match['path']}`. {_closest_class(match['path'].rpartition('.')[2])}"
    if match := _SHORT_NAME.search(message):
        return f"{where}there is no class `{match['name']}`. {_closest_class(match['name'])}"
    if match := _HELP_OPTION.search(message):
        return f"`--{match['key']}.help` needs the name of a class, such as {', '.join(_own_callbacks())}."
    if match := _COMMAND_LINE.search(message) or _TOP_OPTION.search(message):
        return f"there is no option `{match['key']}`. {_closest_option(match['key'], set(options_of(parser)))}"
    return f"{where}{'; '.join(reasons)}" if (reasons := reasons_of(message)) else message


_NO_REASON = (
    *("Does not validate", "Not a valid subclass", "Expected a <class 'NoneType'>"),
    *("a dict ", "a class "),
)


def reasons_of(told: str) -> list[str]:
    """What is wrong with a value that none of the types takes which jsonargparse has tried; empty for other errors."""
    if "Does not validate against any of the Union subtypes" not in told:
        return []
    _, *lines = told.splitlines()
    keys = [f"`{match['key']}`" for line in lines if (match := _PARSER_KEY.search(line))]
    values = [line.strip() for line in lines if line.strip().startswith("Given value: ") and len(line) < _MOST_SHOWN]
    reasons = [line.strip(" -") for line in lines if line.lstrip().startswith("- ")]
    for line, following in pairwise(lines):  # the error of a constructor follows its class
        if line.strip(" -") in reasons and line.endswith(":") and not _PARSER_KEY.search(following):
            reasons[reasons.index(line.strip(" -"))] += f" {following.strip()}"
    reasons = [reason.removesuffix(":") for reason in reasons]
    return [reason for reason in dict.fromkeys((*keys, *reasons, *values[:1])) if not reason.startswith(_NO_REASON)]


_MOST_SHOWN = 120
"""Characters of a value that is shown."""


def _import_failure(class_path: str) -> str | None:
    """Say why the module of a class can't be imported; None if it can."""
    module, _, name = class_path.rpartition(".")
    if not module or not name:
        return None
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            return _raised(class_path, error)
        if "." in error.name or error.name in sys.stdlib_module_names or find_spec(error.name) is not None:
            return None  # a part of a package that is there, whose classes may be suggested
        return (
            f"there is no module `{error.name}` for the class `{class_path}`: none is installed, and the working "
            f"directory ({os.getcwd()}) has no {error.name}.py."
        )
    except Exception as error:
        return _raised(class_path, error)
    own = Path(*module.split(".")).with_suffix(".py")
    file = getattr(found, "__file__", None)
    if hasattr(found, name) or not own.is_file() or (file is not None and own.resolve() == Path(file).resolve()):
        return None
    return f"`{module}` is the installed module {file or module}, not {own} here. Give your file another name."


def _raised(class_path: str, error: Exception) -> str:
    """Name the error that a module raised while it was imported, and its line in the user's files."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())]
    place = f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"{error.filename}:{error.lineno}"
    return f"`{class_path}` can't be imported: {type(error).__name__}: {error} ({place})."


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
        elif action.option_strings and not action.dest.endswith((".help", "help", "print_config")):
            yield action.dest


def arguments_of(class_path: str) -> set[str]:
    """Return the names of a class's arguments by its path or public name; empty if it takes any, or isn't found."""
    if "." not in class_path:
        return set()
    try:
        return _arguments(class_path)
    except (ImportError, AttributeError):
        return set()


def _arguments(class_path: str) -> set[str]:
    """Return the names of a class's arguments, with those of its bases if it passes `**kwargs` on."""
    module, _, name = class_path.rpartition(".")
    names: set[str] = set()
    for base in inspect.getmro(getattr(import_module(module), name)):
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names.update(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names


def _closest_class(name: str) -> str:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule

    import_public_names()  # only imported classes can be suggested
    paths: dict[str, str] = {}
    for base in (Callback, LightningDataModule, LightningModule):
        for cls in _subclasses(base):
            paths.setdefault(cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    matches = get_close_matches(name, paths, n=3, cutoff=0.5)
    if matches:
        return f"Closest: {', '.join(paths[match] for match in matches)}."
    return "Give its full import path, such as `lightning_memfit.models.CausalLM`."


def _own_callbacks() -> list[str]:
    from lightning.pytorch import Callback

    public = ((name, getattr(lightning_memfit, name)) for name in lightning_memfit.__all__)
    return [name for name, value in public if isinstance(value, type) and issubclass(value, Callback)]


def _subclasses(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        if not cls.__name__.startswith("_"):
            yield cls
        yield from _subclasses(cls)
