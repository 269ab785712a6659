"""Build the wheel and the sdist, install the wheel alone in a bare environment, and use it: `make release-check`.

    python -m tests.release_check [--keep FOLDER]

What a user gets without extras must do what the README's first commands show, away from any checkout and without a
network: in time, and with nothing on stderr. Exits with 1 and names what failed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_WHEEL = (
    "lightning_memfit/__init__.pyi",
    "lightning_memfit/py.typed",
    "lightning_memfit/cli/main.py",
    "lightning_memfit/recipes/quickstart.yaml",
    "lightning_memfit/recipes/quick/gpt2xl.yaml",
    "lightning_memfit/recipes/sizes.json",
    "lightning_memfit/estimate/architectures.json",
)
IN_SDIST = ("README.md", "LICENSE", "pyproject.toml", "cli/main.py", "recipes/quickstart.yaml")
EXTRAS = ("datasets", "deepspeed", "matplotlib", "peft", "torchao", "wandb")
NAMED = ("--model", "gpt2", "--micro-batch-size", "1", "--sequence-length", "128", "--device", "RTX 3060")


@dataclass(frozen=True)
class Command:
    """What is run in the bare environment."""

    name: str
    arguments: tuple[str, ...]
    """Of `memfit`."""
    words: str = ""
    """What its output has."""
    limit_s: float | None = None
    """Seconds that it may take where nothing else runs."""


COMMANDS = (
    Command("doctor", ("doctor",)),
    Command("recipes", ("recipes",), "quickstart"),
    Command("estimate of a model, the first", ("estimate", *NAMED), "Fits", 6),
    Command("estimate of a recipe", ("estimate", "--config", "quickstart", "--device", "12GiB"), "Fits"),
    Command("quickstart", ("fit", "--config", "quickstart"), "The prediction is off by", 150),
)


def build(folder: Path) -> tuple[Path, Path]:
    """Build both, and return the wheel and the sdist. The wheel is built from the sdist, so that this is complete."""
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def missing_files(wheel: Path, sdist: Path) -> Iterator[str]:
    """Name files that are not in the archives."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    yield from (f"{name} is not in the wheel" for name in IN_WHEEL if name not in inside)
    yield from (f"{name} is in the wheel" for name in inside if not name.startswith("lightning_memfit"))
    with tarfile.open(sdist) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    yield from (f"{name} is not in the sdist" for name in IN_SDIST if name not in inside)


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel without extras in a new environment, and return its folder of programs."""
    run([sys.executable, "-m", "venv", str(folder)], ROOT)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    run([*pip, "--upgrade", "pip"], ROOT)
    run([*pip, *constraints, "torch"], ROOT)  # first and alone, as in the Makefile
    run([*pip, *constraints, str(wheel)], ROOT)
    return folder / "bin"


def failures(programs: Path, folder: Path) -> Iterator[str]:
    """Use the installed package in an empty folder, print what each command took, and name what fails."""
    code = f"import importlib.util as u; print(*(n for n in {EXTRAS!r} if u.find_spec(n)))"
    found = run([str(programs / "python"), "-c", code], folder).split()
    yield from (f"{name} is installed without its extra" for name in found)
    for command in COMMANDS:
        yield from (f"`memfit {' '.join(command.arguments)}` {fault}" for fault in use(command, programs, folder))


def use(command: Command, programs: Path, folder: Path) -> Iterator[str]:
    """Run a command as a user would, print what it took, and say what is wrong with it."""
    line = [*without_network(), str(programs / "memfit"), *command.arguments]
    before, started = processor_seconds(), time.monotonic()
    # With what earlier runs have cached, no estimate would be the first.
    fresh = {**environment(), "MEMFIT_CACHE": str(folder.parent / "cache")}
    done = subprocess.run(line, cwd=folder, env=fresh, capture_output=True, text=True)
    elapsed, worked = time.monotonic() - started, processor_seconds() - before
    print(f"{command.name}: exit code {done.returncode}, {elapsed:.1f} s, {worked:.1f} s of processors", flush=True)
    output = " ".join(done.stdout.split())
    if done.returncode or command.words not in output:
        yield f"ended with {done.returncode}: {output[-600:]} {done.stderr[-600:]}"
    elif done.stderr:
        yield f"succeeded, and wrote to stderr: {done.stderr[:600]}"
    # On a busy machine a command waits; what it worked is then the better measure, and never less than what it needs.
    if command.limit_s is not None and min(elapsed, worked) > command.limit_s:
        yield f"took {elapsed:.1f} s, of processors {worked:.1f} s; the limit is {command.limit_s:g} s"


def processor_seconds() -> float:
    """What processes that have ended took of all processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def without_network() -> list[str]:
    """What a command is started with to have no network at all, if this machine can do that (Linux)."""
    prefix = ["unshare", "--map-root-user", "--net"]
    able = shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode
    return prefix if able else []


def environment() -> dict[str, str]:
    """Neither a checkout nor a GPU is there, and nobody has said that there is no network."""
    unset = ("PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


def run(command: list[str], folder: Path) -> str:
    """Run a command that has to work, and return what it printed."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main() -> int:
    """Check a release, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.release_check", description="Check a release.")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave the wheel and the sdist here")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        wheel, sdist = build(keep.absolute() if keep is not None else temporary / "dist")
        print(f"built {wheel.name} ({wheel.stat().st_size:,} bytes) and {sdist.name}", flush=True)
        found = [*missing_files(wheel, sdist)]
        programs = install(wheel, temporary / "venv")
        empty = temporary / "empty"
        empty.mkdir()
        found += failures(programs, empty)
    for fault in found:
        print(fault, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
