"""Errors of a command: a user's mistake becomes one message, a defect of ours keeps its traceback."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lightning_memfit

DEBUG_VARIABLE = "MEMFIT_DEBUG"
USER_ERROR = 2

# Our two packages, wherever they are installed: exceptions raised in their files are meant for the user.
_OURS = (Path(__file__).resolve().parent, Path(lightning_memfit.__file__).resolve().parent)


@dataclass
class Outcome:
    """Records how a command ended."""

    code: int = 0


@contextmanager
def readable_errors() -> Iterator[Outcome]:
    """Turn user mistakes into one message on stderr and exit code 2; set `MEMFIT_DEBUG=1` for the traceback."""
    outcome = Outcome()
    try:
        yield outcome
    except SystemExit as stop:
        outcome.code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        mistake = user_mistake(error)
        if os.environ.get(DEBUG_VARIABLE) or mistake is None:
            raise
        print(f"memfit: error: {mistake}", file=sys.stderr)
        outcome.code = USER_ERROR


def user_mistake(error: BaseException) -> BaseException | None:
    """Return the error that was raised to tell the user something: this one, or one that caused it; else None.

    That is Lightning's `MisconfigurationException`, its refusal to overwrite a run's configuration, and a `ValueError`
    or `ModuleNotFoundError` raised by our own code.
    jsonargparse wraps what a constructor raises, hence the causes.
    """
    if type(error).__name__ == "MisconfigurationException":
        return error
    if isinstance(error, (ValueError, ModuleNotFoundError)) and _raised_by_us(error):
        return error
    if isinstance(error, RuntimeError) and str(error).startswith("SaveConfigCallback expected"):
        return error  # Lightning won't overwrite the configuration of an earlier run
    return user_mistake(error.__cause__) if error.__cause__ is not None else None


def _raised_by_us(error: BaseException) -> bool:
    """Whether the last frame is a `raise` statement of ours, not a call that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    last = frames[-1]
    return any(Path(last.filename).is_relative_to(folder) for folder in _OURS) and (last.line or "").startswith("raise")
