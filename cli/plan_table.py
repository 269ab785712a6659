"""What `memfit plan` prints for people, from the plan's plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memfit.memory import GIB, format_bytes

_TIERS = {"device": "device", "pinned_host": "pinned host memory", "host": "host memory", "disk": "disk"}


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print a plan on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(_headline(plan), style="bold")
    if plan["fits"]:
        for line in _figures(plan):
            console.print(line, markup=False)
        console.print(_memory(plan))
        if plan["bought"]:
            console.print(_bought(plan))
    if plan["alternatives"]:
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
    larger = f"Largest micro-batch that would still fit: about {plan['largest_micro_batch']}"
    if plan["longest_sequence"]:
        larger += f"; longest sequence, one at a time: about {plan['longest_sequence']} tokens"
    verified = []
    if plan["verified_bytes"] is not None:
        verified = [f"A trace of the plan itself needs {format_bytes(plan['verified_bytes'])}"]
    return [
        f"Plan: {plan['label']}",
        f"Predicted peak {format_bytes(plan['peak_bytes'])} of live tensors; with fragmentation and runtime "
        f"{format_bytes(plan['needed_bytes'])}, {format_bytes(plan['headroom_bytes'])} of headroom beside the margin",
        *verified,
        f"Predicted {plan['seconds_per_step']:.2f} s per step, {speed} ({shares})",
        larger,
    ]


def _memory(plan: Mapping[str, Any]) -> Table:
    title = "Memory at the peak" + (", per device" if plan["setting"]["world_size"] > 1 else "")
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("where")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for tier, entries in plan["breakdown"].items():
        for category, size in entries.items():
            table.add_row(_TIERS[tier], category.replace("_", " "), f"{size / GIB:.3f}")
        if len(plan["breakdown"]) > 1:
            table.add_row(f"[bold]{_TIERS[tier]}[/bold]", "[bold]in all[/bold]", f"{sum(entries.values()) / GIB:.3f}")
    return table


def _bought(plan: Mapping[str, Any]) -> Table:
    table = Table(title="What each technique is for", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("technique")
    table.add_column("GiB saved", justify="right")
    table.add_column("s per step", justify="right")
    for item in plan["bought"]:
        table.add_row(item["technique"], f"{item['saved_bytes'] / GIB:.3f}", f"{item['extra_seconds']:+.2f}")
    return table


def _alternatives(plan: Mapping[str, Any]) -> Table:
    table = Table(title="Not chosen", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("techniques", overflow="fold")
    table.add_column("why", overflow="fold")
    for item in plan["alternatives"]:
        table.add_row(Text(item["techniques"]), Text(item["reason"]))
    return table
