"""Llama-3.1-8B's published speed beside the planner's: `python -m benchmarks.sharded_traces.published_speed`.

Forward and backward are traced with each run's techniques from the model's name; seconds come from the planner's rates
for the device, which nobody measured. Writes the results and the section of the page.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.marks import insert
from benchmarks.micro_batching.record import write
from benchmarks.sharded_traces.table import PAGE, ROOT
from lightning_memfit.estimate.architectures import NamedRun
from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.estimate.named import profile_named
from lightning_memfit.estimate.target import named_target
from lightning_memfit.memory import GIB
from lightning_memfit.planner.time import PassWork, TimeModel, rates_of
from lightning_memfit.techniques.core.setting import Setting

RESULT = ROOT / "benchmarks" / "results" / "llama31_speed.json"
MODEL, MICRO_BATCH = "llama-3.1-8b", 2


@dataclass(frozen=True)
class Run:
    """A published run."""

    gib: float
    tokens_per_s: int
    """Of each GPU."""
    source: str
    device: str
    sequence_length: int
    precision: str
    techniques: tuple[str, ...]
    selective: bool = False
    """Keep products and attention; else everything is recomputed."""
    per_machine: int = 1
    machines: int = 1

    @property
    def setting(self) -> Setting:
        """The run in our words."""
        setting = Setting(world_size=self.per_machine * self.machines)
        for name in self.techniques:
            setting = setting.choose(name)
        options = {"mode": "selective", "keep": ["matmul", "attention"]} if self.selective else {"mode": "full"}
        return setting.choose("activation_checkpointing", **options)


_TITAN = "torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md`"
_TUNE = "torchtune, `README.md` of September 2024"
_FULL = ("paged_optimizer_8bit", "gradient_release")
_FSDP = ("fsdp2", "fused_adamw")
_TITAN_RUN = Run(82.4, 5762, f"{_TITAN}, table 1", "H100 SXM", 8192, "bf16-mixed", _FSDP, per_machine=8)
_TITANS = Run(67.0, 5605, f"{_TITAN}, table 3", "H100 SXM", 8192, "bf16-mixed", _FSDP, False, 8, 16)
RUNS: dict[str, Run] = {
    "8 H100, FSDP, 2 x 8192; all recomputed": _TITAN_RUN,
    "8 H100, FSDP, 2 x 8192; products and attention kept": replace(_TITAN_RUN, selective=True),
    "128 H100, FSDP, 2 x 8192; all recomputed": _TITANS,
    "128 H100, FSDP, 2 x 8192; products and attention kept": replace(_TITANS, selective=True),
    "1 RTX 4090, full finetune, 2 x 2048": Run(18.9, 1650, _TUNE, "RTX 4090", 2048, "bf16-true", _FULL),
    "1 RTX A6000, full finetune, 2 x 2048": Run(37.4, 2579, _TUNE, "RTX A6000", 2048, "bf16-true", _FULL),
    "1 RTX 4090, LoRA, 2 x 2048": Run(16.2, 3083, _TUNE, "RTX 4090", 2048, "bf16-true", ("lora",)),
    "1 RTX A6000, LoRA, 2 x 2048": Run(30.3, 4699, _TUNE, "RTX A6000", 2048, "bf16-true", ("lora",)),
    "1 RTX 4090, QLoRA, 2 x 2048": Run(7.4, 2413, _TUNE, "RTX 4090", 2048, "bf16-true", ("qlora",)),
}


def predict(run: Run) -> dict[str, float | None]:
    """Tokens per second of each GPU; and where one device has everything, what it must have and what is allocated."""
    target, setting = named_target(run.device), run.setting
    named = NamedRun(
        MODEL, MICRO_BATCH, run.sequence_length, run.precision, device=target.kind, capability=target.capability
    )
    plain = profile_named(named)
    alone = setting.without("strategy")
    passes = profile_named(replace(named, techniques=tuple(alone.techniques())), callbacks=alone.traced_callbacks)
    time = TimeModel(plain, rates_of(target), run.per_machine, run.machines)
    seconds = time.step(setting, PassWork.of(passes, MICRO_BATCH), 1).total
    found = estimate_step(passes, MICRO_BATCH, target.runtime) if setting.sharding is None else None
    return {
        "tokens_per_s": MICRO_BATCH * run.sequence_length / seconds,
        "needed_bytes": None if found is None else found.total_bytes,
        "allocated_bytes": None if found is None else found.allocated_bytes,
    }


def text() -> str:
    """A row for each run."""
    rows = json.loads(RESULT.read_text())["rows"]
    lines = [
        "| run | tokens/s of a GPU | predicted | of it | GiB, published | needed, predicted | allocated |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in RUNS.items():
        row = rows[name]
        speed = row["tokens_per_s"]
        needed, allocated = (
            "above" if row[key] is None else f"{row[key] / GIB:.1f} GiB" for key in ("needed_bytes", "allocated_bytes")
        )
        lines.append(
            f"| {name} ({run.source}) | {run.tokens_per_s:,} | {speed:,.0f} | {speed / run.tokens_per_s:.2f} | "
            f"{run.gib} GiB | {needed} | {allocated} |"
        )
    return "\n".join(lines)


def page(before: str) -> str:
    """The page with its table made anew."""
    return insert(before, "llama31_speed", text())


if __name__ == "__main__":
    if "--text" not in sys.argv:
        rows = {}
        for name, run in RUNS.items():
            rows[name] = predict(run)
            print(name, rows[name], flush=True)
        write(RESULT, {"rows": rows})
    Path(PAGE).write_text(page(PAGE.read_text()))
    print(f"wrote {RESULT.name} and {PAGE.name}")
