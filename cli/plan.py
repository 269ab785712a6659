"""`memfit plan`: the fastest way to train a recipe on a device, why, and the file that makes `fit` do it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.units import format_seconds, unit_of_column, unit_of_seconds

from .arguments import (
    RECIPE_HELP,
    add_batch_options,
    check_new_file,
    command_parser,
    next_line,
    of_batch,
    read_arguments,
    report_table,
)
from .progress import ProgressLine
from .recipe_files import overlay_text

_EPILOG = """\
examples:
  memfit plan --config gpt2xl --device "RTX 3060" --out plan.yaml
  memfit fit --config gpt2xl --config plan.yaml
  memfit plan --config mine.yaml --device 24GiB --allow exact,bf16 --json
  memfit plan --config mine.yaml --with chunked_loss --device 24GiB
  memfit plan --config mine.yaml --device 24GiB --prefer speed         (the fastest of what may change by default)
  memfit plan --config mine.yaml --device "2x RTX 3090" --host-memory 64GiB
  memfit plan --config mine.yaml --device 8GiB --disk 500GiB --disk-writes-per-day 1TiB

exit codes: 0 something fits, 1 nothing fits, 2 cannot tell (or a mistake, which is explained)
"""


def main(argv: list[str]) -> int:
    """Plan, print, write, and return the exit code."""
    parser = make_parser()
    arguments, overrides = read_arguments(parser, argv)
    if arguments.config is None:
        parser.error("give `--config RECIPE`")
    _check_files(arguments)
    from .plan_recipe import PlanRequest, plan_recipe

    request = PlanRequest.of(arguments, overrides)
    with ProgressLine("planning", is_quiet=arguments.json) as line:
        made = plan_recipe(request, progress=line, with_page=arguments.html is not None)
    if made is None:
        return 2
    plan, page = made
    overlay = overlay_text(plan["summary"], plan["overlay"]) if plan["fits"] else None
    written = {name: text for name, text in ((arguments.out, overlay), (arguments.html, page)) if name and text}
    for name, text in written.items():
        with Path(name).open("x", encoding="utf-8") as file:
            file.write(text)
    if arguments.json:
        json.dump(plan, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_plan(plan, arguments.verbose)
        for name in written:
            print(f"Written: {name}")
        print(_next(plan["fits"], arguments.out in written, arguments, argv, overrides))
    return int(not plan["fits"])


def make_parser() -> argparse.ArgumentParser:
    """Make the parser for our own options; all other options belong to the recipe."""
    parser = command_parser(
        "plan",
        "Find the fastest setting that fits a device, without the device, and say why.",
        _EPILOG,
        "--config RECIPE [--KEY VALUE ...] [options]",
    )
    parser.add_argument_group("the recipe", RECIPE_HELP)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="GPU by name, a size such as 12GiB, several such as '8x A100 80GB', or cpu (default: what is here)",
    )
    parser.add_argument(
        "--allow",
        metavar="CLASSES",
        help="numerics that may change where that is faster, of exact, tf32, bf16, fp16, stochastic, 8bit, 4bit, "
        "optimizer, lora (default: exact,tf32,bf16,stochastic,8bit, and only if nothing else fits)",
    )
    parser.add_argument(
        "--prefer",
        metavar="WHAT",
        help="numbers: the recipe's own, wherever they fit; speed: change what may change if that gains over 5%% "
        "(default: speed with --allow, else numbers)",
    )
    _add_limits(parser)
    add_batch_options(parser)
    parser.add_argument("--out", metavar="FILE.yaml", help="write what `fit --config RECIPE --config FILE` trains with")
    parser.add_argument("--html", metavar="FILE.html", help="write a page that compares all settings at any limit")
    parser.add_argument("--verbose", action="store_true", help="print what was not chosen and why")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write cached traces")
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options for what a run may use in addition to its devices."""
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="RAM that offloading may use (default: what is free here)"
    )
    parser.add_argument(
        "--pinned-memory", metavar="SIZE", help="part of it that may be page-locked; containers limit it (default: all)"
    )
    parser.add_argument("--disk", metavar="SIZE", help="disk that offloading may use on each machine (default: none)")
    parser.add_argument(
        "--nvme-path",
        metavar="FOLDER",
        default=os.environ.get("MEMFIT_NVME_PATH"),
        help="folder on a local drive to offload to; speed and free space are measured (default: $MEMFIT_NVME_PATH)",
    )
    parser.add_argument(
        "--disk-writes-per-day", metavar="SIZE", help="what training may write to disk in a day (default: no limit)"
    )


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse files that can't be written, or that two options name, before planning."""
    named = {option: Path(name) for option, name in (("--out", arguments.out), ("--html", arguments.html)) if name}
    for option, path in named.items():
        check_new_file(option, path)
    if len(named) > len({path.resolve() for path in named.values()}):
        raise ValueError(f"`--html {arguments.html}` is the file of `--out`. Name another one.")


def _next(
    fits: bool, is_written: bool, arguments: argparse.Namespace, argv: Sequence[str], overrides: Sequence[str]
) -> str:
    """Say how to go on: train by the plan, write it first, or see what takes the memory."""
    if not fits:
        device = [] if arguments.device is None else ["--device", arguments.device]
        return next_line("estimate", [*overrides, *device, *of_batch(arguments)], "where the memory goes")
    if is_written:
        return next_line("fit", [*overrides, "--config", arguments.out])
    numbered = (f"plan_{number}.yaml" for number in count(2))
    free = next(name for name in chain(["plan.yaml"], numbered) if not Path(name).exists())
    return next_line("plan", [*argv, "--out", free])


# --- what `memfit plan` prints, from the plan's plain data ------------------------------------------------------------


_TIERS = {"device": "device", "pinned_host": "pinned host memory", "host": "host memory", "disk": "disk"}


def print_plan(plan: Mapping[str, Any], is_verbose: bool = False) -> None:
    """Print a plan on stdout; what was not chosen, where something fits, only on request."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(_headline(plan), style="bold")
    if plan["fits"]:
        for line in _figures(plan):
            console.print(line, markup=False)
        _print_rows(console, plan)
        console.print(_memory(plan))
        if plan["bought"]:
            console.print(_bought(plan))
    else:
        _print_rows(console, plan)
    if plan["alternatives"] and (is_verbose or not plan["fits"]):
        console.print(_alternatives(plan))
    for line in plan["advice"]:
        console.print(f"- {line}", style="yellow", markup=False)
    for note in plan["notes"]:
        console.print(f"- {note}", style="yellow", markup=False)
    style = "bold green" if plan["fits"] else "bold red"
    console.print(Text(plan["summary"] if not plan["fits"] else f"Fits: {plan['summary']}", style=style))


def _headline(plan: Mapping[str, Any]) -> Text:
    parts = [f"{plan['model']}: {plan['num_parameters']:,} parameters"]
    size = f"{plan['batch_size']} samples per step"
    parts.append(f"{size} x {plan['sequence_length']} tokens" if plan["sequence_length"] else size)
    count = f"{plan['devices']} x " if plan["devices"] > 1 else ""
    return Text(" | ".join([*parts, f"{count}{plan['device']}, {format_bytes(plan['usable_bytes'])} usable"]))


def _figures(plan: Mapping[str, Any]) -> list[str]:
    speed = f"{plan['samples_per_s']:.2f} samples/s"
    if plan["tokens_per_s"]:
        speed = f"{plan['tokens_per_s']:.0f} tokens/s"
    shares = ", ".join(
        f"{name} {value / plan['seconds_per_step']:.0%}"
        for name, value in plan["seconds"].items()
        if value > 0.005 * plan["seconds_per_step"]
    )
    return [
        f"Plan: {plan['label']}",
        plan["numbers"][0].upper() + plan["numbers"][1:],
        f"Predicted peak {format_bytes(plan['peak_bytes'])} of live tensors; with fragmentation and runtime "
        f"{format_bytes(plan['needed_bytes'])}, {format_bytes(plan['headroom_bytes'])} of headroom beside the margin",
        f"Predicted {format_seconds(plan['seconds_per_step'])} per step, {speed} ({shares})",
    ]


def _memory(plan: Mapping[str, Any]) -> Table:
    title = "Memory at the peak" + (", per device" if plan["setting"]["world_size"] > 1 else "")
    name_of_unit, unit = unit_of_column(sum(entries.values()) for entries in plan["breakdown"].values())
    table = report_table(title, "where", "what", f">{name_of_unit}")
    for tier, entries in plan["breakdown"].items():
        for category, size in entries.items():
            table.add_row(_TIERS[tier], category.replace("_", " "), f"{size / unit:.3f}")
        if len(plan["breakdown"]) > 1:
            table.add_row(f"[bold]{_TIERS[tier]}[/bold]", "[bold]in all[/bold]", f"{sum(entries.values()) / unit:.3f}")
    return table


def _bought(plan: Mapping[str, Any]) -> Table:
    name_of_unit, unit = unit_of_column(item["saved_bytes"] for item in plan["bought"])
    name_of_time, second = unit_of_seconds(item["extra_seconds"] for item in plan["bought"])
    table = report_table(
        "What each technique is for", "technique", f">{name_of_unit} saved", f">{name_of_time} per step"
    )
    for item in plan["bought"]:
        extra = round(item["extra_seconds"] / second, 2) + 0.0  # no minus before zero
        table.add_row(item["technique"], f"{item['saved_bytes'] / unit:.3f}", f"{extra:+.2f}")
    return table


def _print_rows(console: Console, plan: Mapping[str, Any]) -> None:
    """Print what the plan is compared with: setting, figures, and what it changes in the numbers."""
    for row in plan["rows"]:
        name = row["name"][0].upper() + row["name"][1:]
        console.print(f"{name}: {row['label'] or row['note']}", markup=False)
        if row["label"]:
            for line in _row_lines(row, "tokens" if plan["sequence_length"] else "samples"):
                console.print(f"  {line}", markup=False)


def _row_lines(row: Mapping[str, Any], unit: str) -> list[str]:
    above, below = ("at least ", "at most ") if "at least" in row["basis"] else ("", "")
    figures = [{True: "fits", False: "doesn't fit", None: "not known to fit"}[row["fits"]]]
    if row["needed_bytes"] is not None and row["fits"] is not False:
        figures.append(f"{above}{format_bytes(row['needed_bytes'])}")
    if row["fits"] is False:
        figures[0] += f": {row['note']}"
    if row["seconds_per_step"] is not None:
        figures.append(f"{above}{format_seconds(row['seconds_per_step'])} per step, {below}{row['per_s']:.0f} {unit}/s")
    if row["note"] and row["fits"] is not False:
        figures.append(row["note"])
    return ["; ".join(figures), f"changes in the numbers: {', '.join(row['changes']) or 'none'}"]


def _alternatives(plan: Mapping[str, Any]) -> Table:
    table = report_table("Not chosen", "techniques", "why")
    for item in plan["alternatives"]:
        table.add_row(Text(item["techniques"]), Text(item["reason"]))
    return table
