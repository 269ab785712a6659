"""Errors of a command: a mistake becomes one message, anything else one line with its place and the way to see more."""

import os
import re
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lightning_memfit
from lightning_memfit.extras import EXTRAS, how_to_install, is_installed
from lightning_memfit.memory.error_chain import error_chain

DEBUG_OPTION = "--debug"
DEBUG_VARIABLE = "MEMFIT_DEBUG"
USER_ERROR = 2
INTERRUPTED = 130
RUN_FAILED = 1
"""A run that had begun ended in an error; before that nothing is lost, and the code is that of a mistake."""

_MOST_LINES, _MOST_CHARACTERS = 6, 1200
"""How much of an unexpected error's message is shown; torch's list every tensor of a model."""

# Our two packages, wherever they are installed: exceptions raised in their files are meant for the user.
_OURS = (Path(__file__).resolve().parent, Path(lightning_memfit.__file__).resolve().parent)


@dataclass
class Outcome:
    """Records how a command ended."""

    code: int = 0


class RunFailedError(Exception):
    """Raised from the error that ended a run which had begun to train."""


@contextmanager
def readable_errors(debug: bool = False) -> Iterator[Outcome]:
    """Turn user mistakes into one message on stderr and exit code 2."""
    outcome = Outcome()
    try:
        yield outcome
        if sys.stdout is not None:  # as where the process was started without it
            sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more can be flushed to it at exit
    except SystemExit as stop:
        outcome.code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if outcome.code and not isinstance(stop.code, int):  # words, which Python prints (`sys.exit("no data")`)
            print(stop.code, file=sys.stderr)
    except Exception as error:
        mistake = (None if isinstance(error, RunFailedError) else missing_extra(error)) or user_mistake(error)
        if debug or os.environ.get(DEBUG_VARIABLE) or mistake is None:
            raise
        print(f"memfit: error: {mistake}", file=sys.stderr)
        outcome.code = USER_ERROR


def _output_is_closed() -> bool:
    """Whether whoever reads what is printed has seen enough, rather than another pipe having broken."""
    with suppress(OSError, ValueError, AttributeError):  # Windows has no `poll`
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def missing_extra(error: BaseException) -> str | None:
    """Say which optional package an error misses, and how to install it; None if it is another error."""
    for one in error_chain(original(error)):
        if not isinstance(one, ImportError):
            continue
        named = (one.name or "").partition(".")[0]
        words = {named} if named else set(re.findall(r"\w+", str(one).lower()))
        package = next((extra for extra in EXTRAS if extra in words and not is_installed(extra)), None)
        if package is not None:
            command = how_to_install(package)
            told = next((line.strip(" -") for line in str(error).splitlines() if command in line), None)
            return told or f"this needs {package}, which is not installed: {command}"
    return None


def user_mistake(error: BaseException) -> BaseException | None:
    """Return the error that was raised to tell the user something: this one, or one that caused it; else None.

    That is Lightning's `MisconfigurationException`, its refusal to overwrite a run's configuration (in other words),
    and a `ValueError` or `ModuleNotFoundError` raised by our own code.
    jsonargparse wraps what a constructor raises, hence the causes.
    """
    if type(error).__name__ == "MisconfigurationException":
        return error
    if isinstance(error, (ValueError, ModuleNotFoundError)) and _raised_by_us(error):
        return error
    if isinstance(error, RuntimeError) and str(error).startswith("SaveConfig"):
        return error
    return user_mistake(error.__cause__) if error.__cause__ is not None else None


def _raised_by_us(error: BaseException) -> bool:
    """Whether the last frame is a `raise` statement of ours, not a call that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:  # it was raised in a process that traces
        return any(Path(getattr(error, "raised_in", "")).is_relative_to(folder) for folder in _OURS)
    last = frames[-1]
    return any(Path(last.filename).is_relative_to(folder) for folder in _OURS) and (last.line or "").startswith("raise")


def report_unexpected(error: BaseException) -> int:
    """Print what ended a command, when nobody foresaw it, and return the exit code."""
    code = RUN_FAILED if isinstance(error, RunFailedError) else USER_ERROR
    error = original(error)
    from lightning_memfit.profile.culprit import is_of_this_package

    own_kind = any(map(is_of_this_package, type(error).__mro__))
    told = str(error) if own_kind else traceback.format_exception_only(type(error), error)[-1].strip()
    place, of_rank = _place(error), _of_rank(told)
    if of_rank is not None:
        told, place = of_rank
    lines = [line for line in told.splitlines() if line.strip()]
    shown = "\n".join(lines[:_MOST_LINES])[:_MOST_CHARACTERS]
    more = " ..." if len(shown) < len("\n".join(lines)) else ""
    if code == RUN_FAILED:
        traceback.print_exception(type(error), error, error.__traceback__)
    fix = "The traceback stands above." if code == RUN_FAILED else f"`{DEBUG_OPTION}` for the traceback."
    print(f"memfit: error: {shown}{more} ({place}). {fix}", file=sys.stderr)
    return code


def _of_rank(told: str) -> tuple[str, str] | None:
    """Return the last error and its place from a message that holds the traceback of a rank in another process."""
    head, begins, printed = told.rpartition("Traceback (most recent call last):")
    frames = [(name, line) for name, line in re.findall(r'^  File "(.+)", line (\d+)', printed, re.M)]
    error = re.split(r"^ .*\n", printed, flags=re.M)[-1].strip()
    if not begins or not frames or not error:
        return None
    rank = re.search(r"Process (\d+) terminated", head)
    name, line = ([frame for frame in frames if _is_users(frame[0])] or frames)[-1]
    return (f"rank {rank[1]}: {error}" if rank else error), f"{name}:{line}"


def original(error: BaseException) -> BaseException:
    """Return the error itself, or the one that ended a run."""
    return error.__cause__ if isinstance(error, RunFailedError) and error.__cause__ is not None else error


def _place(error: BaseException) -> str:
    """Return the file and line that raised an error: the user's own code if it was there, else the last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else "no file"


def _is_users(filename: str) -> bool:
    from lightning_memfit.profile.culprit import owner_of

    return owner_of(filename) == "user" and not any(Path(filename).is_relative_to(folder) for folder in _OURS)
