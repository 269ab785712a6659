"""`memfit estimate`: how much memory a run needs, where, and whether it fits; of a recipe or of a model's name."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memfit.profile.garbage import collector_paused

if TYPE_CHECKING:
    from lightning_memfit.estimate.report import EstimateReport

_EPILOG = """\
examples:
  memfit estimate --config gpt2xl --device "RTX 3060"
  memfit estimate --config mine.yaml --trainer.precision=bf16-true --json
  memfit estimate --model gpt2-xl --micro-batch-size 4 --precision bf16-mixed --device 24GiB

exit codes: 0 it fits, 1 it does not, 2 cannot tell (or a mistake, which is explained)
"""


def main(argv: list[str]) -> int:
    """Estimate, print, and return the exit code."""
    parser = make_parser()
    ours, overrides = split_arguments(parser, argv)
    arguments = parser.parse_args(ours)
    if arguments.config is None and arguments.model is None:
        parser.error("give `--config RECIPE`, or `--model NAME` for a model that is only named")
    if arguments.timeline is not None and Path(arguments.timeline).exists():
        raise ValueError(f"`--timeline {arguments.timeline}` exists already. Name another file: none is overwritten.")
    if arguments.config is None and overrides:
        parser.error(f"`{overrides[0]}` needs `--config`: a model that is only named takes the options above")
    atexit.register(gc.freeze)  # walking torch's and transformers' objects once more takes over a second at exit
    # Real steps may need what the collector frees.
    with contextlib.nullcontext() if arguments.measure else collector_paused():
        report = _report(arguments, overrides)
    if report is None:
        return 2
    _show(report, arguments)
    return report.verdict.exit_code


def _report(arguments: argparse.Namespace, overrides: list[str]) -> EstimateReport | None:
    """The report, by the half of the command that was asked for; only that half is imported."""
    if arguments.config is not None:
        from .estimate_recipe import estimate_recipe

        return estimate_recipe(arguments, overrides)
    from .estimate_named import estimate_named

    return estimate_named(arguments)


def make_parser() -> argparse.ArgumentParser:
    """The options that are ours; whatever else follows a recipe is the recipe's."""
    parser = argparse.ArgumentParser(
        prog="memfit estimate",
        usage="memfit estimate (--config RECIPE [--KEY VALUE ...] | --model NAME [options]) [options]",
        description="Say how much memory training needs, where and why, without using it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    both = parser.add_argument_group("for both")
    both.add_argument(
        "--device", metavar="NAME", help="GPU by name, a size such as 12GiB, or cpu (default: what is here)"
    )
    both.add_argument(
        "--micro-batch-size", type=_positive, metavar="N", help="samples at a time (default: the recipe's)"
    )
    both.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    both.add_argument("--timeline", metavar="FILE.html", help="draw memory over the step; never overwrites")
    both.add_argument("--no-cache", action="store_true", help="neither read nor write cached profiles")
    both.add_argument("--no-shorten", action="store_true", help="trace every block, not some of those that are alike")
    recipe = parser.add_argument_group("for a recipe")
    recipe.add_argument("--config", "-c", action="append", metavar="RECIPE", help="file or name, as for `memfit fit`")
    recipe.add_argument("--measure", action="store_true", help="run two real steps here where a trace can't be had")
    named = parser.add_argument_group("for a model that is only named")
    named.add_argument("--model", metavar="NAME", help="gpt2-xl, llama-3.1-8b, ..., or a folder with a config.json")
    named.add_argument("--sequence-length", type=_positive, metavar="N", help="tokens per sample")
    named.add_argument("--precision", help="32-true, bf16-mixed, 16-mixed, bf16-true or 16-true (default: 32-true)")
    named.add_argument("--optimizer", help="adamw, adamw_fused, sgd, adamw_8bit, ... (default: adamw)")
    named.add_argument("--checkpointing", choices=("none", "full"), help="activation checkpointing (default: none)")
    named.add_argument("--attention", choices=("sdpa", "eager"), help="attention implementation (default: sdpa)")
    named.add_argument("--accumulate-grad-batches", type=_positive, metavar="N", help="default: 1")
    return parser


NAMED_OPTIONS = (
    "sequence_length",
    "precision",
    "optimizer",
    "checkpointing",
    "attention",
    "accumulate_grad_batches",
)
"""Options that a recipe states itself."""


def split_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate our options from those of the recipe, each in order. `--config` is both's.

    Behind a `--config`, `--model` is the recipe's.
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _show(report: EstimateReport, arguments: argparse.Namespace) -> None:
    if arguments.timeline is not None:
        from lightning_memfit.estimate.timeline import write_timeline

        write_timeline(report, arguments.timeline)
    if arguments.json:
        json.dump(report.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    from .estimate_table import print_report

    print_report(report)
    if arguments.timeline is not None:
        print(f"Timeline: {arguments.timeline}")
