"""Collect the wheels that a GPU machine without a package index lacks: `python -m benchmarks.gpu.pack FOLDER`.

Meant for a machine that has torch, lightning, transformers and torchmetrics of its own but no index. There:

    python3 -m pip install --no-index --no-deps FOLDER/*.whl && make gpu PYTHON=python3

The wheels take about 45 MiB, nearly all of it bitsandbytes' CUDA libraries.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

WHEELS = (
    "bitsandbytes",
    "jsonargparse",
    "docstring_parser",
    "typeshed_client",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "annotated_types",
    "typing_inspection",
    "importlib_resources",
    "nvidia-ml-py",
    "pytest-timeout",
    "hjson",
    "py-cpuinfo",
)
SOURCE_ONLY = ("deepspeed==0.19.8", str(Path(__file__).parents[2]))
"""Built here: DeepSpeed without its operators, which the GPU machine compiles on first use, and this package, whose
metadata `memfit doctor` and others read; the code that runs there is the checkout's."""


def pack(folder: Path, python_version: str) -> int:
    """Put wheels for Linux into a folder, without their dependencies, and return their bytes."""
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"--platform={name}" for name in ("manylinux_2_24_x86_64", "manylinux2014_x86_64", "any")]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={python_version}", *platforms]
    subprocess.run([*pip, "download", *options, "--dest", str(folder), *WHEELS], check=True)
    build = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "wheel", *build, *SOURCE_ONLY], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    return sum(file.stat().st_size for file in folder.glob("*.whl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine (default: 3.12)")
    arguments = parser.parse_args()
    size = pack(arguments.folder, arguments.python_version)
    print(f"{arguments.folder}: {size / 2**20:.0f} MiB of wheels. On the GPU machine, without an index:")
    print(f"    python3 -m pip install --no-index --no-deps {arguments.folder}/*.whl && make gpu PYTHON=python3")
    return 0


if __name__ == "__main__":
    sys.exit(main())
