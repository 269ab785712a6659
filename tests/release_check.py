"""Build the wheel and the sdist, install the wheel alone in a bare environment, and use it: `make release-check`.

    python -m tests.release_check [--keep FOLDER]

What a user gets without extras must do what the README's first commands show, away from any checkout and without a
network. Exits with 1 and names what failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_WHEEL = (
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
COMMANDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("doctor", ("doctor",), ""),
    ("recipes", ("recipes",), "quickstart"),
    ("estimate of a model", ("estimate", *NAMED), "Fits"),
    ("estimate of a recipe", ("estimate", "--config", "quickstart", "--device", "12GiB"), "Fits"),
    ("quickstart", ("fit", "--config", "quickstart"), "The prediction is off by"),
)
"""What is run in the bare environment: a name, arguments of `memfit`, and words that its output has."""


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
    for name, arguments, words in COMMANDS:
        started = time.monotonic()
        done = subprocess.run(
            [str(programs / "memfit"), *arguments], cwd=folder, env=environment(), capture_output=True, text=True
        )
        print(f"{name}: exit code {done.returncode}, {time.monotonic() - started:.1f} s", flush=True)
        output = " ".join((done.stdout + done.stderr).split())
        if done.returncode or words not in output:
            yield f"`memfit {' '.join(arguments)}` ended with {done.returncode}: {output[-600:]}"


def environment() -> dict[str, str]:
    """Neither a checkout nor a network nor a GPU is there."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}


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
