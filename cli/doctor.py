"""`memfit doctor`: what this machine has, and what would hinder training, with a fix for each problem."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from .arguments import command_parser

if TYPE_CHECKING:
    from lightning_memfit.device.health import Finding

_EPILOG = "exit codes: 0 nothing hinders training here, 1 something does, 2 a mistake, which is explained"
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def main(argv: list[str]) -> int:
    """Examine the machine, print, and return the exit code."""
    what = "Say what this machine has and what would hinder training or offloading, each with its fix."
    parser = command_parser("doctor", what, _EPILOG)
    parser.add_argument("--folder", default=".", help="folder for checkpoints and offloaded states (default: here)")
    parser.add_argument(
        "--measure", action="store_true", help="measure this device for 20 seconds, and keep it for later plans"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    arguments = parser.parse_args(argv)

    from lightning_memfit.device.health import examine, hinders

    if arguments.measure:
        measure(sys.stderr if arguments.json else sys.stdout)
    findings = examine(arguments.folder)
    problem = hinders([finding for group in findings.values() for finding in group])
    if arguments.json:
        document = {"hinders": problem, "findings": {k: [asdict(f) for f in group] for k, group in findings.items()}}
        json.dump(document, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_findings(findings, problem)
    return int(problem)


def measure(stream: TextIO) -> None:
    """Measure the device in this machine, keep what is found for plans, and show it."""
    import torch

    from lightning_memfit.memory import format_bytes
    from lightning_memfit.memory.kind import CPU, CUDA
    from lightning_memfit.planner.feedback import device_name
    from lightning_memfit.planner.measured import measure as measured_on
    from lightning_memfit.planner.rates import CalibrationFile

    device = torch.device(CUDA if torch.cuda.is_available() else CPU)
    file = CalibrationFile(device_name(device))
    print(f"Measuring {device_name(device)}...", file=stream, flush=True)
    found = measured_on(device)
    file.keep(found)
    for kind, rate in found.operators.items():
        print(f"  {kind}: {f'{rate / 1e12:.3g} TFLOP' if ' ' in kind else format_bytes(int(rate))}/s", file=stream)
    print(f"  issuing an operator: {found.launch_seconds * 1e6:.1f} us", file=stream)
    print(f"Kept for later plans in {file.path}.", file=stream, flush=True)


def print_findings(findings: dict[str, list[Finding]], problem: bool) -> None:
    """Print a table for each subject, and a verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("check", "", "found", "fix"):
        table.add_column(heading, overflow="fold")
    for subject, group in findings.items():
        table.add_section()
        table.add_row(f"[bold]{subject}[/bold]")
        for finding in group:
            style = _STYLES[finding.level]
            table.add_row(finding.name, f"[{style}]{finding.level}[/{style}]", finding.found, finding.fix)
    console.print(table)
    console.print(
        "Something would hinder training here: see `problem` above." if problem else "Nothing hinders training."
    )
