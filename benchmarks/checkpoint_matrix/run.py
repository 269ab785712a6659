"""Whether training goes on exactly from every strategy and world size to every other, on the CPU over gloo.

`python -m benchmarks.checkpoint_matrix.run` takes about a quarter of an hour on two cores and writes
`benchmarks/results/checkpoint_matrix.json`; `make aio` first, for ZeRO-Infinity. To each strategy on each number of
ranks
it goes from every strategy, on a number of ranks that is drawn; with `--all`, from every number, which takes four times
as long. One process per rank runs many cells, in one process group.
"""

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "checkpoint_matrix.json"
PACKAGES = ("lightning-memfit", "torch", "lightning", "transformers", "deepspeed")
AT_ONCE = 50
"""Cells that one group of processes runs: one that ends them takes no more than these with it."""


def main(every_size: bool = False) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    import deepspeed  # noqa: F401  once, before processes are forked
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import lightning_memfit.strategies.zero_infinity  # noqa: F401
    from benchmarks.checkpoint_matrix.cells import KINDS, SCALARS_REFUSED, WORLD_SIZES, End, Subject

    ends = [End(kind, size) for kind in KINDS for size in WORLD_SIZES[kind]]
    plain = [end for end in ends if end.kind not in SCALARS_REFUSED]
    rows: list[dict[str, Any]] = []
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for subject, of_subject in ((Subject("adamw", False), ends), (Subject("sgd", True), plain)):
            saved(of_subject, subject, Path(folder))
            for size in (1, 2, 3, 4):
                cells = []
                for target in (end for end in of_subject if end.world_size == size):
                    for kind in KINDS:
                        sources = [end for end in of_subject if end.kind == kind]
                        some = sources if every_size else chance.sample(sources, min(1, len(sources)))
                        cells += [(source, target) for source in some]
                rows += resumed(cells, subject, Path(folder))
                write(rows)


def saved(ends: Any, subject: Any, folder: Path) -> None:
    """Save a checkpoint of every end."""
    from benchmarks.checkpoint_matrix.cells import save_all
    from tests.helpers.ranks import run_ranks

    for size in sorted({end.world_size for end in ends}):
        own = [end for end in ends if end.world_size == size]
        for ended in run_ranks(save_all, size, folder / f"save-{size}", own, subject, folder, seconds=900):
            if ended.code or ended.result:
                raise RuntimeError(f"saving {subject.name} on {size} ranks: {ended.result}\n{ended.output[-3000:]}")


def resumed(cells: Any, subject: Any, folder: Path) -> list[dict[str, Any]]:
    """Rows of all cells; those of one world size."""
    from dataclasses import asdict

    import torch

    from benchmarks.checkpoint_matrix.cells import resume_all
    from tests.helpers.ranks import run_ranks

    rows: list[dict[str, Any]] = []
    for begin in range(0, len(cells), AT_ONCE):
        some = cells[begin : begin + AT_ONCE]
        size = some[0][1].world_size
        file = folder / f"rows-{subject.name}-{size}.pt"
        file.unlink(missing_ok=True)
        ended = run_ranks(resume_all, size, folder / "resume", some, subject, folder, seconds=900)
        found = torch.load(file, weights_only=True) if file.exists() else []
        for source, target in some[len(found) :]:
            words = "; ".join(one.error for one in ended if one.error) or "the processes have ended"
            found.append({"source": asdict(source), "target": asdict(target), "subject": subject.name})
            found[-1] |= {"verdict": "crashed", "words": words[:300]}
        rows += found
        print(subject.name, size, begin + len(some), "of", len(cells), *(one.code for one in ended), flush=True)
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    """Write the rows so far."""
    from benchmarks.gpt2xl_two_steps.run import hardware

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    document = {
        "command": "python -m benchmarks.checkpoint_matrix.run",
        "rows": rows,
        "hardware": hardware(),
        "versions": {package: version(package) for package in PACKAGES} | {"python": platform.python_version()},
        "commit": commit.stdout.strip(),
    }
    RESULTS.write_text(json.dumps(document, separators=(",", ":")).replace('{"source"', '\n{"source"') + "\n")


if __name__ == "__main__":
    main("--all" in sys.argv)
