"""`memfit scale`: measure a matrix of processes, sizes and techniques, tracked by Weights & Biases, and report it."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import cast

from lightning_memfit.bench.experiment import Experiment, load_sweep, write_wandb_sweep
from lightning_memfit.bench.report import write_report
from lightning_memfit.bench.runner import Runner
from lightning_memfit.bench.tracking import Mode, Tracking

from .arguments import command_parser
from .bench import FOLDER, add_run_options, check_device, file_of, measure, read_recipe, show, worker_command

_EPILOG = """\
examples:
  memfit scale --config benchmarks/experiments/sweeps/scaling.yaml
  memfit scale --config mine.yaml --device cuda --wandb online --project mine
  memfit scale --config mine.yaml --device cuda --sweep sweep.yaml        (for `wandb sweep` and `wandb agent`)
  memfit scale --config mine.yaml --report-only

Every point becomes FOLDER/SWEEP_DEVICE/RUN.json; points.csv, report.md and PNG files are made of them. Offline runs
of Weights & Biases lie in FOLDER/SWEEP_DEVICE/wandb until `wandb sync FOLDER/SWEEP_DEVICE/wandb/offline-run-*`.

exit codes: 0 every point has a result (out of memory is one), 1 a point failed, 2 a mistake, which is explained,
130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the parser for the command's options."""
    parser = command_parser("scale", str(__doc__), _EPILOG)
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="the matrix, by file or name (scaling); see docs/guides/scale.md",
    )
    add_run_options(parser, Path("runs/scale"))
    parser.add_argument(
        "--wandb",
        choices=("online", "offline", "off"),
        help="where runs are tracked (default: WANDB_MODE, else offline)",
    )
    parser.add_argument("--project", default="lightning-memfit", help="Weights & Biases project")
    parser.add_argument(
        "--sweep",
        type=Path,
        metavar="FILE",
        help="measure nothing; write a Weights & Biases sweep of all points for `wandb sweep FILE` and its agents",
    )
    parser.add_argument("--report-only", action="store_true", help="make the report from existing records")
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    sweep = load_sweep(file_of("--config", arguments.config, FOLDER / "sweeps"), arguments.device, read_recipe)
    if arguments.sweep is not None:
        command = [*shlex.split(_command(arguments)), "--wandb", "online", "--project", arguments.project]
        write_wandb_sweep(sweep, arguments.sweep, command)
        print(f"Next: wandb sweep --project {arguments.project} {arguments.sweep}, then its command on each machine")
        return 0
    folder = arguments.folder / sweep.folder_name
    runner = Runner(
        sweep.name,
        sweep.scale,
        sweep.device,
        folder,
        worker_command(),
        lambda row: _command(arguments, "--only", row),
        arguments.note,
        None if arguments.report_only else _tracking(arguments, sweep, folder),
    )
    if arguments.report_only:
        results = runner.known(sweep.rows)
    else:
        points = sweep.only(arguments.only)
        check_device(arguments.device)
        results = measure(runner, points, arguments.repeat)
    if not results:
        raise ValueError(f"`--report-only`: there are no records in {folder}. Run the sweep first, without it.")
    known = runner.known(sweep.rows)
    written = write_report(sweep.title, known, folder, _command(arguments, "--report-only")) if known else []
    show(results, f"{sweep.title} ({sweep.device})", arguments.json)
    for path in written if not arguments.json else ():
        print(f"wrote {path}")
    return int(any(result.status == "failed" for result in results))


def _tracking(arguments: argparse.Namespace, sweep: Experiment, folder: Path) -> Tracking:
    mode = arguments.wandb or os.environ.get("WANDB_MODE") or "offline"
    mode = {"disabled": "off", "dryrun": "offline", "run": "online"}.get(mode, mode)
    if mode not in ("online", "offline", "off"):
        raise ValueError(f"`WANDB_MODE={mode}` must be online, offline or disabled. Or give `--wandb`.")
    return Tracking(cast(Mode, mode), arguments.project, f"{sweep.name}-{sweep.device}", str(folder.resolve()))


def _command(arguments: argparse.Namespace, *more: str) -> str:
    options = ["--config", arguments.config, "--device", arguments.device, "--folder", str(arguments.folder)]
    return shlex.join(["memfit", "scale", *options, *more])
