"""Plan GPT-2 XL (random weights, 64 x 1024 tokens per step) for devices of many sizes, on no device at all.

`python -m benchmarks.planner.gpt2xl_plans` writes `benchmarks/results/planner_gpt2xl.json`. Traces are shared between
devices through a cache of its own, so that the first plan takes longest.
"""

import logging
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.record import write
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate.target import named_target
from lightning_memfit.memory import GIB
from lightning_memfit.models import CausalLM
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.workload import (
    KEEP_NUMBERS,
    Devices,
    Limits,
    Workload,
    check_allow,
    facts_of,
    parse_device_count,
)
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.step import StepOptions

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "planner_gpt2xl.json"

CONFIG = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}

DEFAULT = ("exact", "tf32", "bf16", "stochastic", "8bit")


@dataclass(frozen=True)
class Case:
    """One machine, and what may change."""

    device: str
    """One, several such as `2x24GiB`, or `cpu`."""
    host_gib: int = 64
    """Of host memory; on the CPU all there is."""
    allow: tuple[str, ...] = DEFAULT
    disk_gib: int = 0


CASES = (
    Case("12GiB"),
    Case("16GiB"),
    Case("24GiB"),
    Case("40GiB"),
    Case("80GiB"),
    Case("2x24GiB"),
    Case("8x A100 80GB", 512),
    Case("12GiB", 16),
    Case("8GiB"),
    Case("8GiB", 16),
    Case("8GiB", 16, disk_gib=500),
    Case("6GiB"),
    Case("12GiB", 64, ("exact",)),
    Case("40GiB", 64, ("exact",)),
    Case("cpu", 64),
    Case("cpu", 16),
)


def workload() -> Workload:
    """The recipe `gpt2xl` as far as a plan depends on it."""
    module = CausalLM(config=CONFIG, optimizer_options={"betas": [0.9, 0.95]})
    ids = torch.arange(2 * 1024).reshape(2, 1024) % 256
    options = StepOptions("bf16-mixed", 16, 1.0)
    target = named_target("12GiB")
    batch = {"input_ids": ids, "labels": ids.clone()}
    facts = facts_of(module, target, options)
    return Workload(module, batch, options, 64, target, rates_of(target), facts, tolerance=KEEP_NUMBERS)


def on_machine(plain: Workload, case: Case) -> Workload:
    """The workload on a case's devices; a CPU has the host memory that the case gives it."""
    count, name = parse_device_count(case.device)
    target, host = named_target(name), case.host_gib * GIB
    if target.kind == "cpu":
        target = replace(target, name="CPU", capacity_bytes=host, margin_bytes=safety_margin_bytes(host))
    return replace(
        plain,
        target=target,
        rates=rates_of(target),
        facts=replace(plain.facts, device=target.kind, capability=target.capability if target.kind == "cuda" else None),
        limits=Limits(host_bytes=host if target.kind == "cuda" else None, disk_bytes=case.disk_gib * GIB),
        allow=check_allow(case.allow),
        devices=Devices(count or 1),
        strategies=True,
    )


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    plain, rows = workload(), []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            started = time.perf_counter()
            plan = make_plan(on_machine(plain, case), ProfileCache(Path(folder)))
            seconds = round(time.perf_counter() - started, 1)
            asked = {"host_gib": case.host_gib, "disk_gib": case.disk_gib, "allow": sorted(case.allow)}
            rows.append({**asked, "planned_s": seconds, "plan": plan.to_dict()})
            print(f"{case}: {plan.summary()} ({seconds} s)", flush=True)
    write(RESULTS, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
