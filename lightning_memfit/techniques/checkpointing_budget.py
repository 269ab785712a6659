"""Resolve `ActivationCheckpointing(budget=...)` into a plan, from traces of the run that is about to begin."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.checkpointing.blocks import BlockGroup, find_blocks, select_blocks
from lightning_memfit.checkpointing.knapsack import CheckpointingPlan
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.device.runtime import RuntimeMemory, runtime_memory
from lightning_memfit.estimate.block_figures import BudgetError
from lightning_memfit.estimate.checkpointing_budget import BudgetPlanner, ComputeRate, cpu_rate, device_rate
from lightning_memfit.estimate.estimate import CUDA_ROUNDING, predict_total_bytes
from lightning_memfit.estimate.target import device_target
from lightning_memfit.memory import parse_bytes
from lightning_memfit.memory.kind import CPU, CUDA, compute_capability, index_of
from lightning_memfit.profile.events import EventList
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import AUTOCAST_DTYPES, TRUE_DTYPES, StepOptions, Workload
from lightning_memfit.profile.trace import Emulation, Trace, TraceError, TraceRequest, somewhere, trace_step
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.first_batch import first_batch

Checkpointing = Callable[..., TechniqueCallback]
"""The class `ActivationCheckpointing`, passed as an argument because its module imports this one."""


@dataclass(frozen=True)
class ResolvedBudget:
    """A budget in bytes and the plan made for it."""

    limit_bytes: int
    plan: CheckpointingPlan
    plain_seconds: float
    """Seconds of a step without checkpointing, by the same rates as the plan's extra time."""


def make_planner(
    module: Any,
    batch: Any,
    options: StepOptions,
    emulation: Emulation,
    rate: ComputeRate,
    checkpointing: Checkpointing,
    techniques: tuple[TechniqueCallback, ...] = (),
    rounding_bytes: int = CUDA_ROUNDING,
    blocks: str | Sequence[str] | None = None,
) -> BudgetPlanner:
    """Trace the step as planning for any budget needs it.

    Raises:
        TraceError: If the step can't be traced.
        BudgetError: If the blocks can't be planned for.
    """

    def trace(shorten: bool, check: bool, **arguments: Any) -> Trace:
        workload = Workload(module, batch, options, (*techniques, checkpointing(**arguments, blocks=blocks)))
        return trace_step(TraceRequest(workload, emulation, shorten, check, find_groups))

    def find_groups(clone: torch.nn.Module) -> list[BlockGroup]:
        return find_blocks(clone) if blocks is None else select_blocks(clone, blocks)

    def trace_uniform(choice: Choice) -> Trace:
        # Written as a mode, so that a trace may be shortened.
        kept = choice.removeprefix("keep_").split("_") if choice.startswith("keep_") else ()
        # Values that have to be assumed, and mixtures' routings, are those of the step, whatever is recomputed.
        return trace(True, choice == "none", mode="selective" if kept else choice, keep=kept)

    def trace_plan(choices: tuple[Choice, ...]) -> Trace:
        return trace(False, False, choices=choices)

    return BudgetPlanner(trace_uniform, trace_plan, rate, rounding_bytes)


def resolve_budget(
    budget: str,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    checkpointing: type[TechniqueCallback],
    blocks: str | Sequence[str] | None = None,
) -> ResolvedBudget | None:
    """Make a plan for the run that a Trainer is about to begin; every rank gets the plan of the first.

    Returns:
        None, after a warning, where this process can't be forked, and the module can't be sent to a new one.

    Raises:
        ValueError: If there is no such plan, or none can be made; the message says why and what to do.
    """
    outcome: Any = None
    if trainer.global_rank == 0:
        try:
            outcome = _resolve(budget, trainer, module, checkpointing, blocks)
        except (ValueError, TraceError) as error:
            outcome = error
        # What traces leave in cycles would lie in memory during the first steps, and count where these are measured.
        gc.collect(1)
    if trainer.world_size > 1:
        outcome = trainer.strategy.broadcast(outcome)
    if isinstance(outcome, BudgetError):
        raise outcome
    if isinstance(outcome, TraceError) and outcome.cause == "process":
        rank_zero_warn(
            f"ActivationCheckpointing: every block is recomputed, as `budget={budget!r}` can't be planned: {outcome}"
        )
        return None
    if isinstance(outcome, Exception):
        raise ValueError(
            f"`budget={budget!r}` can't be planned for: {outcome} Or choose `mode` or `choices` instead."
        ) from outcome
    assert isinstance(outcome, ResolvedBudget)
    return outcome


def _resolve(
    budget: str,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    checkpointing: type[TechniqueCallback],
    blocks: str | Sequence[str] | None,
) -> ResolvedBudget:
    device = trainer.strategy.root_device
    capability = compute_capability(device)
    cuda = capability is not None
    emulation = Emulation(CPU) if capability is None else Emulation(CUDA, capability)
    precision = trainer.precision
    options = StepOptions(
        precision,  # type: ignore[arg-type]
        trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm,
    )
    dtype = {**AUTOCAST_DTYPES, **TRUE_DTYPES}.get(precision, torch.float32)
    rate = device_rate(torch.cuda.get_device_name(device), dtype) if cuda else cpu_rate(dtype)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    techniques = [c for c in callbacks if isinstance(c, TechniqueCallback)]
    others = tuple(c for c in techniques if not isinstance(c, checkpointing))
    runtime = runtime_memory(emulation.capability) if cuda else None
    limit, workspace, measure = _limit_of(budget, trainer, runtime)
    with ExitStack() as stack:
        for technique in reversed(techniques):  # exited in reverse, and so applied again in their own order
            stack.enter_context(technique.taken_off(trainer, module))
        # A MemoryLimit rounds on the CPU as CUDA's allocator does.
        rounding = CUDA_ROUNDING if cuda or budget == "auto" else 1
        batch = first_batch(trainer)
        make = partial(make_planner, module, batch, options, emulation, rate, checkpointing, others, rounding, blocks)
        elsewhere = stack.enter_context(somewhere(type(module).__name__, module, batch, *others))
        return elsewhere.run(partial(_plan, make, limit, workspace, measure))


_Measure = Callable[[EventList], int]


def _plan(
    make: Callable[[], BudgetPlanner], limit: int | float, workspace: int, measure: _Measure | None
) -> ResolvedBudget:
    """Trace and plan for a limit in bytes, or as a share of the activations (`float`)."""
    planner = make()
    limit_bytes = planner.share_bytes(limit) + workspace if isinstance(limit, float) else limit
    plan, _ = planner.plan(limit_bytes, workspace, measure)
    return ResolvedBudget(limit_bytes, plan, planner.plain_seconds)


def _limit_of(
    budget: str, trainer: pl.Trainer, runtime: RuntimeMemory | None
) -> tuple[int | float, int, _Measure | None]:
    """What a budget means for `_plan`."""
    workspace = runtime.allocated_bytes if runtime is not None else 0
    if budget == "auto":
        limit, counts_reserved = _available_bytes(trainer, runtime)
        workspace += runtime.context_bytes if runtime is not None else 0
        return limit, workspace, partial(_total_bytes, runtime) if counts_reserved else None
    if budget.endswith("%"):
        return float(budget[:-1]) / 100, workspace, None
    return parse_bytes(budget, "budget"), workspace, None


def _total_bytes(runtime: RuntimeMemory | None, events: EventList) -> int:
    """Bytes that a device with a caching allocator must have: reserved memory and the context."""
    return predict_total_bytes(ModelProfile(name="", events=events, micro_batch_size=1), 1, runtime)


def _available_bytes(trainer: pl.Trainer, runtime: RuntimeMemory | None) -> tuple[int, bool]:
    """The memory that `auto` means: all that the device has left, or that a `MemoryLimit` leaves it.

    Returns:
        Bytes, and whether they count reserved memory rather than live tensors.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    limits = [c for c in callbacks if isinstance(c, MemoryLimit)]
    if runtime is not None:
        target = device_target(index_of(trainer.strategy.root_device))
        assert target.usable_bytes is not None
        return min([target.usable_bytes, *(c.limit_bytes + runtime.context_bytes for c in limits)]), True
    tightest = min(limits, key=lambda limit: limit.limit_bytes)
    return tightest.limit_bytes, False
