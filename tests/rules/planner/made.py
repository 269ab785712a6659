"""Profiles with figures made up, so that the planner's arithmetic is tested without a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_memfit.device.runtime import RuntimeMemory
from lightning_memfit.estimate.steady_state import SteadyState
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory import Category
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.planner.rates import Rates
from lightning_memfit.planner.trace_store import NotTraced, passes_of, stepping_of
from lightning_memfit.planner.workload import DEFAULT_ALLOW, Limits, Workload
from lightning_memfit.profile.events import CATEGORIES, OUTSIDE, EventList
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.work import OperatorWork
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.setting import Setting

MIB = 1 << 20
NUM_BLOCKS = 4
NUM_PARAMETERS = 64 * MIB

RATES = Rates(
    "made up", {"float32": 10e12, "tf32": 20e12, "bfloat16": 40e12, "float16": 40e12}, 500e9, 8e-6, True, 20e9
)
RUNTIME = RuntimeMemory(100 * MIB, 0, 0, "made up")


class Recorder:
    """Builds an event list storage by storage."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.blocks: list[int] = []
        self.sizes: list[int] = []
        self.categories: list[int] = []
        self.phases: list[tuple[int, str]] = []
        self.slopes: list[float] = []

    def phase(self, name: str) -> None:
        self.phases.append((len(self.events), name))

    def make(self, size: float, category: Category, block: int = OUTSIDE, per_sample: float = 0.0) -> int:
        self.sizes.append(int(size + 2 * per_sample))
        self.slopes.append(per_sample)
        self.categories.append(CATEGORIES.index(category))
        self.events.append(len(self.sizes))
        self.blocks.append(block)
        return len(self.sizes)

    def free(self, number: int, block: int = OUTSIDE) -> None:
        self.events.append(-number)
        self.blocks.append(block)

    def profile(self, **facts: Any) -> ModelProfile:
        array = {name: np.array(getattr(self, name), dtype=np.int64) for name in ("events", "sizes", "categories")}
        events = EventList(
            **array,
            event_blocks=np.array(self.blocks, dtype=np.int64),
            sites=np.zeros(len(self.sizes), dtype=np.int64),
            site_names=("somewhere",),
            phases=tuple(self.phases),
        )
        return ModelProfile(
            name="Made", events=events, micro_batch_size=2, **facts, slopes=np.array(self.slopes), device="cuda"
        )


def made_step(itemsize: int, kept: float, extra: float, states: float, scratch: float, recompute: float = 0.0,
              logits: float = 0.0, dtype: str = "float32") -> ModelProfile:  # fmt: skip
    """Two steps of four equal blocks: each keeps `kept` MiB per sample and needs `extra` more while it runs."""
    record, weights = Recorder(), itemsize * NUM_PARAMETERS
    record.make(weights, Category.PARAMETER)
    gradient, state = 0, 0
    for _ in range(2):
        record.phase("forward")
        held = []
        for block in range(NUM_BLOCKS):
            work = record.make(0, Category.TEMPORARY, block, extra * MIB)
            held.append(record.make(0, Category.ACTIVATION, block, kept * MIB))
            record.free(work, block)
        head = record.make(0, Category.ACTIVATION, per_sample=logits * MIB)
        if gradient:
            record.free(gradient)
        record.phase("backward")
        record.free(head)
        gradient = record.make(weights, Category.GRADIENT)
        for block in reversed(range(NUM_BLOCKS)):
            work = record.make(0, Category.TEMPORARY, block, extra * MIB)
            record.free(work, block)
            record.free(held[block], block)
        record.phase("step")
        state = state or record.make(states, Category.OPTIMIZER_STATE)
        record.free(record.make(scratch, Category.TEMPORARY))
    record.phase("end")
    flops = 2e12
    return record.profile(
        parameters=(ParameterInfo("weight", NUM_PARAMETERS, itemsize, shape=(8192, 8192), dims=2),),
        num_blocks=NUM_BLOCKS,
        optimizer="AdamW",
        flops={"forward": int(flops), "backward": int((2 + recompute) * flops)},
        work=made_work({"forward": flops, "backward": (2 + recompute) * flops}, dtype),
    )


def made_work(flops: dict[str, float], dtype: str = "float32") -> dict[str, tuple[OperatorWork, ...]]:
    """Twenty products of two samples in each phase, and operators that move 4 MiB in forward, twice as much after."""
    return {
        phase: (
            OperatorWork(f"product {dtype}", many / 20, 0, 20, many / 40),
            OperatorWork("elementwise", 0, 4 * MIB / 80, 80 if phase == "forward" else 160),
        )
        for phase, many in flops.items()
    }


_ACTIVATIONS = {
    "none": {"kept": 100.0, "extra": 20.0},
    "full": {"kept": 10.0, "extra": 110.0, "recompute": 1.0},
    "keep_matmul_attention": {"kept": 50.0, "extra": 60.0, "recompute": 0.1},
}
_STATES = {"": 8, "fused_adamw": 8, "optimizer_8bit": 2, "paged_optimizer": 8}


class MadeTraceStore:
    """Takes the place of a `TraceStore`; notes what was asked for."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.asked: list[tuple[Any, ...]] = []
        self._may_trace = True

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._may_trace = False
        yield
        self._may_trace = True

    def of(self, workload: Workload) -> "MadeTraceStore":
        return type(self)(workload)

    def _note(self, key: tuple[Any, ...]) -> None:
        if not self._may_trace and key not in self.asked:
            raise NotTraced(str(key))
        self.asked.append(key)

    def plain(self) -> ModelProfile:
        return made_step(4, **_ACTIVATIONS["none"], states=8 * NUM_PARAMETERS, scratch=4 * NUM_PARAMETERS)

    def passes(self, setting: Setting, choice: str) -> ModelProfile:
        pure = passes_of(setting)
        self._note(("passes", pure, choice))
        itemsize = 2 if pure.precision == "bf16-true" else 4
        half = 0.5 if "bf16" in pure.precision else 1.0
        figures = {k: v * (1.0 if k == "recompute" else half) for k, v in _ACTIVATIONS[choice].items()}
        states, scratch = 2 * itemsize * NUM_PARAMETERS, itemsize * NUM_PARAMETERS
        dtype = "bfloat16" if "bf16" in pure.precision else "float32"
        return made_step(itemsize, **figures, states=states, scratch=scratch, dtype=dtype)

    def has_passes(self, setting: Setting, choice: str) -> bool:
        return ("passes", passes_of(setting), choice) in self.asked

    def rounded_bytes(self) -> dict[Category, int]:
        return {Category.PARAMETER: 0, Category.BUFFER: 0}

    def exactly(self, setting: Setting, division: Any = None) -> ModelProfile:
        self.asked.append(("exactly", setting))
        return self.passes(Setting(chosen=setting.chosen), "none")

    def stepping(self, setting: Setting, rounding: int) -> SteadyState:
        pure = stepping_of(setting)
        self._note(("stepping", pure))
        itemsize = 2 if pure.precision == "bf16-true" else 4
        optimizer = pure.of_kind("optimizer")
        states = _STATES.get(optimizer.name if optimizer else "", 8) * NUM_PARAMETERS
        return SteadyState.of(made_step(itemsize, 0.0, 0.0, states=states, scratch=0.0), rounding)


def made_workload(
    usable_mib: int, allow: frozenset[str] = DEFAULT_ALLOW, samples_per_step: int = 8, **changes: Any
) -> Workload:
    """Eight samples per step on a device of that size, fp32, clipping by norm."""
    target = Target("a made up GPU", "cuda", usable_mib * MIB, 0, (8, 0), RUNTIME)
    facts = Facts("cuda", (8, 0), gradient_clip_val=1.0, num_blocks=NUM_BLOCKS)
    facts = replace(facts, optimizers=("AdamW",))
    import torch

    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    workload = Workload(
        object(), batch, StepOptions("32-true", 1, 1.0), samples_per_step, target, RATES, facts, Limits(), allow
    )
    return replace(workload, **changes)
