"""Plan GPT-2 XL (random weights, 64 x 1024 tokens per step) for devices of many sizes, on no device at all.

`python -m benchmarks.planner.gpt2xl_plans` writes `benchmarks/results/planner_gpt2xl.json`. Traces are shared between
devices through a cache of its own, so that the first plan takes longest.
"""

import json
import logging
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_memfit.estimate.target import named_target
from lightning_memfit.memory import GIB
from lightning_memfit.models import CausalLM
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.workload import Limits, Workload, check_allow, facts_of
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.step import StepOptions

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "planner_gpt2xl.json"

CONFIG = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}

DEFAULT = ("exact", "tf32", "bf16", "stochastic", "8bit")
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("12GiB", 64, DEFAULT),
    ("16GiB", 64, DEFAULT),
    ("24GiB", 64, DEFAULT),
    ("40GiB", 64, DEFAULT),
    ("80GiB", 64, DEFAULT),
    ("12GiB", 16, DEFAULT),
    ("8GiB", 64, DEFAULT),
    ("8GiB", 16, DEFAULT),
    ("12GiB", 64, ("exact",)),
    ("40GiB", 64, ("exact",)),
)
"""Device, GiB of host memory, what may change."""


def workload() -> Workload:
    """The recipe `gpt2xl` as far as a plan depends on it."""
    module = CausalLM(config=CONFIG, optimizer_options={"betas": [0.9, 0.95]})
    ids = torch.arange(2 * 1024).reshape(2, 1024) % 256
    options = StepOptions("bf16-mixed", 16, 1.0)
    target = named_target("12GiB")
    batch = {"input_ids": ids, "labels": ids.clone()}
    return Workload(module, batch, options, 64, target, rates_of(target), facts_of(module, target, options))


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    plain, rows = workload(), []
    with tempfile.TemporaryDirectory() as folder:
        for device, host_gib, allow in CASES:
            target = named_target(device)
            started = time.perf_counter()
            plan = make_plan(
                replace(
                    plain,
                    target=target,
                    rates=rates_of(target),
                    limits=Limits(host_bytes=host_gib * GIB),
                    allow=check_allow(allow),
                ),
                ProfileCache(Path(folder)),
                overlap=True,
            )
            seconds = round(time.perf_counter() - started, 1)
            rows.append({"host_gib": host_gib, "allow": sorted(allow), "planned_s": seconds, "plan": plan.to_dict()})
            print(f"{device}, {host_gib} GiB host, {','.join(allow)}: {plan.summary()} ({seconds} s)", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    document: dict[str, Any] = {
        "command": "python -m benchmarks.planner.gpt2xl_plans",
        "commit": commit.stdout.strip(),
        "versions": {name: version(name) for name in ("torch", "lightning", "transformers", "bitsandbytes")}
        | {"python": platform.python_version()},
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
