"""What several commands share: parsers, our options apart from the recipe's, tables, and the line to type next."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .recipe_files import configs_of

if TYPE_CHECKING:
    from rich.table import Table

_SECTIONS = ("model", "data", "trainer", "seed_everything", "ckpt_path", "with", "made_for", "print_config")
"""What options of a recipe begin with."""

RECIPE_HELP = "--config RECIPE, -c RECIPE: file or name, and further options of it, as for `memfit fit`"
"""What `--help` says of options that are the recipe's."""


def command_parser(command: str, what: str, epilog: str = "", usage: str | None = None) -> argparse.ArgumentParser:
    """Make a parser for a command's own options; its words are printed as they are written."""
    return argparse.ArgumentParser(
        prog=f"memfit {command}",
        usage=None if usage is None else f"memfit {command} {usage}",
        description=what,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def report_table(title: str, *headings: str) -> Table:
    """Make a table of a report, whose columns are aligned to the right if their heading begins with `>`."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in headings:
        side = "right" if heading.startswith(">") else "left"
        table.add_column(heading.removeprefix(">"), justify=side, overflow="fold")  # type: ignore[arg-type]
    return table


def read_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the options that are ours, and leave those of the recipe, `--config` among them, in their order."""
    ours = {name for action in parser._actions for name in action.option_strings}
    words = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        dashed = name.replace("_", "-")
        words.append(f"{dashed}{equals}{value}" if dashed in ours else argument)
    arguments, recipe = parser.parse_known_args(words)
    for name in (word.partition("=")[0] for word in recipe):
        root = name[2:].partition(".")[0].removesuffix("+")
        if name.startswith("--") and root not in (*_SECTIONS, "config"):
            known = [*ours, *(f"--{section}" for section in _SECTIONS)]
            closest = get_close_matches(name, ours, n=3, cutoff=0.7) or known
            raise ValueError(f"there is no option `{name}`. Closest: {', '.join(closest)}.")
    arguments.config = configs_of(recipe) or None
    return arguments, recipe


LARGEST_COUNT = (1 << 31) - 1
"""No run has more samples, tokens or devices than this; products of a few such counts and sizes stay below 2^127."""


def positive(text: str) -> int:
    """Parse a whole number from 1 to `LARGEST_COUNT`, as the type of an argument."""
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    try:
        number = int(text)
    except ValueError:  # also of more digits than `int` takes
        raise argparse.ArgumentTypeError(f"{shown!r} is no whole number; write for example 8") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{shown} must be at least 1")
    if number > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{shown} must be at most {LARGEST_COUNT:,}")
    return number


def check_new_file(option: str, path: Path) -> None:
    """Refuse a file that can't be written, before the work whose result it is to hold."""
    if os.path.lexists(path):
        raise ValueError(f"`{option} {path}` exists already. Name another file: none is overwritten.")
    if not path.parent.is_dir():
        raise ValueError(f"`{option} {path}`: there is no folder {str(path.parent)!r}. Make it, or name another.")
    try:
        path.touch(exist_ok=False)
        path.unlink()
    except OSError as error:
        raise ValueError(f"`{option} {path}` can't be written: {error.strerror}. Name another file.") from error


def split_device(name: str | None) -> tuple[int | None, str | None]:
    """Split `8x A100 80GB` into a number of devices and the name of one; None where no number is named."""
    if name is None or not name[:1].isdigit() or "x" not in name.lower():
        return None, name
    from lightning_memfit.planner.workload import parse_device_count

    return parse_device_count(name)


def next_line(command: str, words: Sequence[str], why: str = "") -> str:
    """Return the last line of a report: what to type next, as a shell takes it."""
    return f"Next: memfit {shlex.join([command, *words])}" + (f"  # {why}" if why else "")


def of_batch(arguments: argparse.Namespace) -> list[str]:
    """Return the options of `add_batch_options` as they were given."""
    shape = [] if arguments.batch_shape is None else ["--batch-shape", arguments.batch_shape]
    return [*shape, *(["--real-batch"] if arguments.real_batch else [])]


def add_batch_options(parser: Any) -> None:
    """Add the options that say where a recipe's batch comes from to a parser, or a group of its arguments."""
    parser.add_argument(
        "--batch-shape",
        metavar="SHAPES",
        help="shapes of a batch, to read no data, such as input_ids=4x128:int64,labels=4:int64 or 4x3x224x224,4:int64",
    )
    parser.add_argument(
        "--real-batch",
        action="store_true",
        help="take a batch from the recipe's data (default: only where its shapes aren't known otherwise)",
    )
