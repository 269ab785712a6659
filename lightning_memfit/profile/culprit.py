"""Which line of the user's code an error, or what runs at the moment, comes from, and whose code a file holds."""

import functools
import itertools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, TypeVar

_Function = TypeVar("_Function", bound=Any)

Owner = Literal["user", "library", "machinery", "standard"]
"""Whose code it is: the user's own, that of an installed package, that of torch, Lightning and this package, or
Python's."""


def _folders(*names: str) -> tuple[str, ...]:
    """Where packages are, as far as they are installed; finding them imports none of them."""
    found = [spec for name in names if (spec := find_spec(name)) is not None]
    return tuple(f"{folder}{os.sep}" for spec in found for folder in spec.submodule_search_locations or ())


_PACKAGE = Path(__file__).parents[1]
_OWN = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, _PACKAGE.parent / "cli"))
"""This package, and its command line, which lies beside it in a checkout."""

_LIGHTNING = ("lightning", "lightning_utilities", "pytorch_lightning", "lightning_fabric")
_MACHINERY = (*_folders("torch", *_LIGHTNING), *_OWN)
"""Where the trace itself runs: what is raised there may come from fake tensors."""

_INSTALLED = ("site-packages", "dist-packages")

_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


def is_of_this_package(kind: type) -> bool:
    """Whether a class is this package's own, its command line's included."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file.startswith(_OWN)


@functools.cache
def owner_of(filename: str, is_main: bool = False) -> Owner:
    """Whose code a file holds. The user's is what lies nowhere in the installation."""
    if filename.startswith(_MACHINERY):
        return "machinery"
    if any(folder in filename for folder in _INSTALLED):
        return "library"
    if filename.startswith(_STANDARD) or (filename.startswith("<") and not is_main):
        return "standard"
    return "user"


def _owner_of_frame(frame: FrameType) -> Owner:
    return owner_of(frame.f_code.co_filename, frame.f_globals.get("__name__") == "__main__")


def running_frames() -> Iterator[FrameType]:
    """The caller's frame and those that it was called from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


_RUN_STEPS: set[CodeType] = set()


def runs_steps(function: _Function) -> _Function:
    """Mark a function that runs the user's steps: what called it, such as a script or a console command, is no step."""
    _RUN_STEPS.add(function.__code__)
    return function


def calling_line() -> str:
    """The innermost line of the user's code in the step being run, as ` at file:line, in function`; empty without one.

    Code of installed packages is nobody's own.
    """
    for frame in itertools.takewhile(lambda frame: frame.f_code not in _RUN_STEPS, running_frames()):
        if _owner_of_frame(frame) == "user":
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}, in `{frame.f_code.co_name}`"
    return ""


@dataclass(frozen=True)
class Culprit:
    """Where an error comes from."""

    place: str
    """The last line of the user's own code, or else of the library that the module comes from; empty if none ran."""
    is_own: bool
    """Whether code outside of torch, Lightning and this package raised the error."""

    @classmethod
    def of(cls, error: BaseException) -> "Culprit":
        """Read the traceback of an error."""
        frames = [(_owner_of_frame(frame), frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        of_users = [one for one in frames if one[0] == "user"] or [one for one in frames if one[0] == "library"]
        if not of_users:
            return cls("", False)
        _, frame, line = of_users[-1]
        code = frame.f_code
        source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        place = f"{Path(code.co_filename).name}, line {line}, in {code.co_name}{f': `{source}`' * bool(source)}"
        return cls(place, frames[-1][0] != "machinery")
