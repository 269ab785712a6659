"""`memfit bench`: measure the rows of an experiment, each in a process of its own, against their predictions."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_memfit.bench.experiment import Row, closest, load_experiment
from lightning_memfit.bench.record import Result
from lightning_memfit.bench.runner import Runner
from lightning_memfit.bench.table import markdown, print_table
from lightning_memfit.memory.kind import CPU, MODELLED, DeviceKind

from .arguments import command_parser
from .errors import INTERRUPTED
from .recipe_files import resolve, technique_config

_EPILOG = """\
examples:
  memfit bench --experiment bert_large --device cpu --scale small
  memfit bench --experiment mine.yaml --device cuda --only vanilla --repeat

Every row becomes FOLDER/EXPERIMENT_DEVICE_SCALE/ROW.json (fields: benchmarks/README.md), all of them table.md there.
Rows with a result for the same settings are kept, so that an interrupted command goes on where it stopped.

exit codes: 0 every row has a result (out of memory is one), 1 a row failed, 2 a mistake, which is explained,
130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Make the parser for the command's options."""
    parser = command_parser("bench", str(__doc__), _EPILOG)
    parser.add_argument(
        "--experiment", required=True, metavar="NAME|FILE", help="bert_large, gpt2xl, ..., or a YAML file"
    )
    parser.add_argument(
        "--scale", default="full", metavar="NAME", help="one of the experiment's scales (default: full)"
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="run rows on one device in forks of this process, which saves them their imports (Linux)",
    )
    add_run_options(parser, Path("runs/bench"))
    return parser


def add_run_options(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Add the options of everything that measures rows, with the folder that it takes by default."""
    parser.add_argument("--device", choices=MODELLED, default=CPU, help="default: cpu")
    parser.add_argument("--folder", type=Path, default=folder, help=f"default: {folder}")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="this row; may be repeated")
    parser.add_argument("--repeat", action="store_true", help="measure finished rows again")
    parser.add_argument(
        "--note", default="", help="goes into every record, for example what else the machine was doing"
    )
    parser.add_argument("--json", action="store_true", help="print all records as JSON on stdout")


def main(argv: list[str]) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    experiment = load_experiment(
        file_of("--experiment", arguments.experiment, FOLDER), arguments.scale, arguments.device, read_recipe
    )
    rows = experiment.only(arguments.only)
    if arguments.fork:  # asking NVML whether there is a device leaves this process without a context
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    check_device(arguments.device)
    runner = Runner(
        experiment.name,
        experiment.scale,
        experiment.device,
        arguments.folder / experiment.folder_name,
        worker_command(),
        lambda row: _command(arguments, row),
        arguments.note,
        forked=_imported_worker(arguments.device) if arguments.fork else None,
    )
    results = measure(runner, rows, arguments.repeat)
    known = runner.known(experiment.rows)
    if known:
        page = runner.folder / "table.md"
        page.write_text(f"# {experiment.title}\n{markdown(known)}", encoding="utf-8")
    show(results, f"{experiment.title} ({experiment.device}, {experiment.scale})", arguments.json)
    if not arguments.json:
        print(f"Records: {runner.folder}")
    return int(any(result.status == "failed" for result in results))


def measure(runner: Runner, rows: Sequence[Row], repeat: bool) -> list[Result]:
    """Measure rows, and tell each."""
    runner.folder.mkdir(parents=True, exist_ok=True)  # before anything is measured
    try:
        return runner.run(rows, repeat, progress_of(len(rows)))
    except KeyboardInterrupt:
        print(f"memfit: interrupted; finished rows are kept in {runner.folder}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def show(results: Sequence[Result], title: str, as_json: bool) -> None:
    """Print results as a table, or as one JSON document."""
    if as_json:
        json.dump([result.to_dict() for result in results], sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print_table(results, title)


def _imported_worker(device: str) -> Callable[[list[str]], int] | None:
    """The worker's main function, with the libraries that every row uses; None if a fork can't use the device."""
    if sys.platform != "linux":
        raise ValueError("`--fork`: only Linux forks processes safely. Leave it out.")
    import torch
    import transformers.modeling_utils  # noqa: F401

    from .bench_worker import main as worker

    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            torch.zeros(1, device=device)
            os._exit(0)
        os._exit(1)
    if os.waitpid(process, 0)[1] == 0:
        return worker
    message = "an import has used the device already, so that rows run in processes of their own"
    print(f"memfit: {message}", file=sys.stderr)
    return None


def check_device(device: str) -> None:
    """Refuse a GPU if there is none, before every row fails."""
    if not DeviceKind.of(device).is_host:
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                f"`--device {device}`: torch {torch.__version__} sees no CUDA device here. `memfit doctor` says why; "
                "`--device cpu --scale small` runs anywhere."
            )


def progress_of(num_rows: int) -> Callable[[Result, bool], None]:
    """Return a function that prints one line per row on stderr, with the number of rows left and their likely time."""
    measured: list[float] = []
    left = num_rows

    def show(result: Result, measured_now: bool) -> None:
        nonlocal left
        left -= 1
        if measured_now:
            measured.append(result.seconds)
        verb = f"{result.seconds:.0f} s" if measured_now else "kept"
        why = f": {result.error.message}" if result.error is not None and result.status == "failed" else ""
        time = f", about {left * sum(measured) / len(measured) / 60:.1f} min" if measured and left else ""
        status = f"{result.row}: {result.status.replace('_', ' ')} ({verb}){why}"
        print(f"{status}; {left} of {num_rows} left{time}", file=sys.stderr, flush=True)

    return show


def _command(arguments: argparse.Namespace, row: str) -> str:
    options = ["--experiment", arguments.experiment, "--device", arguments.device, "--scale", arguments.scale]
    return shlex.join(["memfit", "bench", *options, "--folder", str(arguments.folder), "--only", row])


# --- experiments of a checkout by name, and the recipes that their rows name ------------------------------------------


_ROOT = Path(__file__).resolve().parent.parent
FOLDER = next((path for path in (_ROOT / "benchmarks" / "experiments", _ROOT / "experiments") if path.is_dir()), _ROOT)
"""Folder of the experiments, in a checkout or in an installed package."""


def file_of(option: str, name: str, folder: Path) -> Path:
    """Return the YAML file of an experiment or a sweep given by name or path."""
    files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    path = Path(name).expanduser()
    if path.is_file() or name in files:
        return path if path.is_file() else files[name]
    hint = closest(name, list(files)) if files else "This installation has none by name: give a YAML file."
    raise ValueError(f"`{option} {name}` is neither a file nor the name of one. {hint}")


def read_recipe(name: str) -> Mapping[str, Any]:
    """Return the configuration of a technique, recipe or file."""
    import yaml

    with contextlib.suppress(ValueError):
        return technique_config(name)
    try:
        path = Path(resolve(name))
    except ValueError as error:
        raise ValueError(str(error).replace("`--config", "layer `", 1)) from None
    content: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def worker_command() -> tuple[str, ...]:
    """Return the command that starts a measured run in a process of its own."""
    return (sys.executable, "-m", f"{__package__}.bench_worker")
