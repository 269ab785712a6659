"""Plans of GPT-2 XL (random weights, 64 x 1024 tokens per step) for devices of many sizes, on no device at all.

Traces are shared between devices through a cache of its own, so that the first plan takes longest.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.runner import Benchmark, Options, Row, Stage
from benchmarks.text import table
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate.target import named_target
from lightning_memfit.memory import GIB, format_bytes
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

RESULT = "planner_gpt2xl.json"

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

    @property
    def name(self) -> str:
        """What there is."""
        disk = f", {self.disk_gib} GiB of disk" if self.disk_gib else ""
        return f"{self.device}, {self.host_gib} GiB of host memory{disk}; {', '.join(self.allow)}"


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


def plan(case: Case, options: Options, row: Row) -> Row:
    """The plan of a case."""
    started = time.perf_counter()
    found = make_plan(on_machine(workload(), case), ProfileCache(options.folder))
    asked = {"host_gib": case.host_gib, "disk_gib": case.disk_gib, "allow": sorted(case.allow)}
    return {**asked, "planned_s": round(time.perf_counter() - started, 1), "plan": found.to_dict()}


def text(document: dict[str, Any]) -> str:
    """One row per GPU with what is allowed by default: what there is, the plan, and what it needs per device."""
    rows = (row for row in document["rows"] if row["allow"] == sorted(DEFAULT) and row["plan"]["device"] != "CPU")
    head = ["device", "host, disk", "plan", "micro-batch", "device", "host", "disk", "tokens/s"]
    return table(head, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    plan = row["plan"]
    count = f"{plan['devices']} x " if plan["devices"] > 1 else ""
    disk = f", {row['disk_gib']} GiB" if row["disk_gib"] else ""
    start = [f"{count}{plan['device'].removeprefix('device of ')}", f"{row['host_gib']} GiB{disk}"]
    if not plan["fits"]:
        return [*start, "nothing fits", *[""] * 5]
    setting, tiers = plan["setting"], plan["breakdown"]
    host, disk_bytes = (
        sum(sum(tiers.get(name, {}).values()) for name in names) for names in (("pinned_host", "host"), ("disk",))
    )
    return [
        *start,
        ", ".join(setting["techniques"]) or "plain",
        f"{setting['micro_batch_size']} x {setting['accumulate_grad_batches']}",
        *(format_bytes(size) if size else "" for size in (plan["needed_bytes"], host, disk_bytes)),
        f"{plan['tokens_per_s']:.0f}",
    ]


BENCHMARK = Benchmark(RESULT, lambda options: CASES, (Stage(plan),), seconds=1800)
