"""Estimate GPT-2 XL as `docs/guides/estimate.md` shows it: `python -m benchmarks.estimator.example`.

No GPU, no weights; half a minute. What the command prints goes into `benchmarks/results/estimate_gpt2xl.json`, with the
figures of `--json`.
"""

import json
import shlex
import subprocess
import sys
from typing import Any

from benchmarks.marks import RESULTS, ROOT
from lightning_memfit.bench.record import versions

RESULT = RESULTS / "estimate_gpt2xl.json"
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
    for line in (line.rstrip() for line in document["printed"].splitlines()):
        skipping = line.startswith(_LEFT_OUT) or (skipping and not line.startswith("Peak by phase"))
        if not skipping:
            kept.append(line)
    return f"```\n$ {document['estimate']}\n" + "\n".join(kept).strip() + "\n```"


def estimate(*more: str) -> str:
    """Run the command, whose verdict is its exit code, and return what it prints."""
    command = [sys.executable, "-m", "cli", "estimate", *ARGUMENTS, *more]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"`memfit estimate` could not tell: {run.stderr[-1000:]}")
    return run.stdout


def main() -> None:
    document = {
        "command": "python -m benchmarks.estimator.example",
        "estimate": shlex.join(["memfit", "estimate", *ARGUMENTS]),
        "versions": versions(),
        "printed": estimate(),
        "report": json.loads(estimate("--json")),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
