"""The estimate of GPT-2 XL that `docs/guides/estimate.md` shows: what the command prints, and the figures of `--json`.

No GPU, no weights; half a minute.
"""

import json
import shlex
import subprocess
import sys
from typing import Any

from benchmarks.runner import Benchmark, Named, Options, Row, Stage, named
from benchmarks.text import ROOT

RESULT = "estimate_gpt2xl.json"
ARGUMENTS = [
    *("--config", "gpt2xl"),
    *("--config", "benchmarks/gpu/random_gpt2xl.yaml"),
    "--trainer.accumulate_grad_batches=16",
    *("--device", "RTX 3060"),
]
_LEFT_OUT = "Largest tensors"


def render(document: dict[str, Any]) -> str:
    """What was printed, without the table of the largest tensors."""
    kept, skipping = [], False
    (row,) = document["rows"]
    for line in (line.rstrip() for line in row["printed"].splitlines()):
        skipping = line.startswith(_LEFT_OUT) or (skipping and not line.startswith("Peak by phase"))
        if not skipping:
            kept.append(line)
    return f"```\n$ {row['estimate']}\n" + "\n".join(kept).strip() + "\n```"


def estimate(*more: str) -> str:
    """Run the command, whose verdict is its exit code, and return what it prints."""
    command = [sys.executable, "-m", "cli", "estimate", *ARGUMENTS, *more]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"`memfit estimate` could not tell: {run.stderr[-1000:]}")
    return run.stdout


def _row(case: Named, options: Options, row: Row) -> Row:
    command = shlex.join(["memfit", "estimate", *ARGUMENTS])
    return {"estimate": command, "printed": estimate(), "report": json.loads(estimate("--json"))}


BENCHMARK = Benchmark(RESULT, lambda options: named(["GPT-2 XL"]), (Stage(_row),), say=lambda row: row["printed"])
