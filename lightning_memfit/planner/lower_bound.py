"""`LowerBound`: the least time and memory that a combination of techniques takes, from closed forms and past traces.

The search asks in order of cost:

- `refuse` and `seconds` are closed forms: they compare weights, gradients and states with the memory there is, and add
  up the time of matrix products and of the optimizer's step.
- `traced_seconds` needs one trace, of forward and backward without checkpointing.
- `solve` needs no further trace. Most remaining combinations are a few percent slower than the best plan: they leave
  less of the device to activations, so that more is recomputed. The solver shows that with a memory model that needs no
  more than the combination will (`MemoryModels.at_least`).
"""

from __future__ import annotations

from dataclasses import replace

from lightning_memfit.memory import format_bytes
from lightning_memfit.planner.candidates import Rejected
from lightning_memfit.planner.solve import Solution, Solver
from lightning_memfit.planner.time import PHASES, PassWork
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.techniques.core.setting import Setting


class LowerBound:
    """Lower bounds on the time and memory of every plan with a combination of techniques.

    Args:
        store: Makes the traces, and gives the plain step.
        solver: Gives the budget, times and memory models that the bounds follow.
    """

    def __init__(self, store: TraceStore, solver: Solver) -> None:
        self._store = store
        self._plain = store.plain()
        self._solver = solver

    def least_bytes(self, setting: Setting) -> int:
        """The least bytes that weights, gradients and states need on the device, by closed form."""
        return self._solver.models.least_bytes(setting) + self._solver.budget.overhead_bytes

    def refuse(self, setting: Setting) -> Rejected | None:
        """Why a combination can't fit, by closed form; None if it may."""
        budget, least = self._solver.budget, self.least_bytes(setting)
        if least > budget.usable_by(setting):
            overhead = budget.overhead_bytes
            context = f"{format_bytes(overhead)} of CUDA context and workspaces"
            what = (
                f"weights, gradients, states and {context} alone" if overhead else "weights, gradients and states alone"
            )
            return Rejected(setting, budget.over(setting, least, f"{what} need"), least)
        placement = self._solver.models.deepspeed(setting)
        refusal = budget.refuse_off_device(placement.elsewhere, setting.world_size) if placement is not None else None
        return Rejected(setting, refusal, resource_limited=True) if refusal is not None else None

    def seconds(self, setting: Setting) -> float:
        """Seconds per step for matrix products, once per sample, and for the optimizer's step."""
        forward, backward = (float(self._plain.flops.get(phase, 0)) for phase in PHASES)
        if setting.of_kind("adapter") not in (None, self._solver.workload.adapter):  # the recipe's own are in the trace
            # Frozen weights have no gradients, which are half of the products; nor has the input of the first block.
            backward *= 0.5 * (1 - 1 / max(1, self._plain.num_blocks))
        per_step = (
            (forward + backward)
            / self._plain.micro_batch_size
            * self._solver.workload.samples_on_each(setting.world_size)
        )
        return self._solver.time.least_seconds(setting, per_step)

    def traced_seconds(self, setting: Setting) -> float:
        """Seconds per step without recomputation, at the best micro-batch.

        Raises:
            TraceError: If the step can't be traced.
        """
        profile, workload = self._store.passes(setting, "none"), self._solver.workload
        samples = workload.samples_on_each(setting.world_size)
        return min(
            self._solver.time.step(setting, PassWork.of(profile, size), samples // size).total
            for size in workload.sizes(setting.world_size)
        )

    def weight(self, setting: Setting) -> float:
        """What a combination's time is multiplied by in comparisons (`NumericsOf`)."""
        return self._solver.numerics.weight(setting)

    def solve(self, setting: Setting) -> Solution | Rejected | None:
        """Find a plan that is at least as good as every plan of these techniques, from existing traces.

        The setting's step without checkpointing must be traced already.

        Returns:
            `Rejected` if not even this plan fits; None if too little is traced.
        """
        model = self._solver.models.at_least(setting)
        if model is None:
            return None
        found = self._solver.solve_with(model, setting)
        if isinstance(found, Rejected) and found.needed_bytes is not None:
            return replace(found, reason=self._solver.budget.over(setting, found.needed_bytes, "needs at least"))
        return found
