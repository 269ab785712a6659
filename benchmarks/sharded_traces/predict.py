"""Peaks of ranks as traces predict them."""

import time
import warnings
from typing import Any

from benchmarks.sharded_traces.cases import Case


def predict(case: Case) -> dict[str, Any]:
    """Predicted peak of the rank after its first step, for ZeRO-Infinity in any step, and where it is."""
    return _in_closed_form(case) if case.under_deepspeed else _by_trace(case)


def _in_closed_form(case: Case) -> dict[str, Any]:
    """DeepSpeed isn't traced: what a trace of one device shows in forward and backward, and what DeepSpeed keeps."""
    from lightning_memfit.estimate.division import division_of, estimate_rank
    from lightning_memfit.profile.build import profile_module
    from lightning_memfit.profile.quiet import LIGHTNING, loggers_at
    from lightning_memfit.profile.step import StepOptions
    from lightning_memfit.profile.trace import Emulation

    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        division = division_of(case.make_strategy(), case.strategy, case.world_size, case.world_size)
        assert division is not None
        module, batch = case.make()
        options = StepOptions(division.traced_precision(case.precision), case.accumulate)  # type: ignore[arg-type]
        started = time.process_time()
        profile = profile_module(
            module, batch, options, Emulation("cpu"), case.make_callbacks(), any_micro_batch=False, cache=None
        )
        found = estimate_rank(profile, division)
    return {
        "predicted_bytes": found.allocated_bytes,
        "phase": found.phase,
        "seconds": round(time.process_time() - started, 2),
    }


def _by_trace(case: Case) -> dict[str, Any]:
    from lightning_memfit.profile.quiet import LIGHTNING, loggers_at
    from lightning_memfit.profile.ranks import Ranks
    from lightning_memfit.profile.step import StepOptions, Workload
    from lightning_memfit.profile.trace import Emulation, TraceError, TraceRequest, trace_step

    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, batch = case.make()
        ranks = Ranks(case.make_strategy, case.world_size, case.rank)
        options = StepOptions(case.precision, case.accumulate)
        started = time.process_time()
        try:
            workload = Workload(module, batch, options, case.make_callbacks(), ranks=ranks)
            trace = trace_step(TraceRequest(workload, Emulation("cpu"), check_assumptions=False))
        except TraceError as error:
            return {"refused": str(error)}
    live = trace.events.live_bytes()
    later = [at for at, name in trace.events.phases if name == "forward"][options.traced_micro_batches :]
    return {
        "predicted_bytes": int(live[later[0] :].max()),
        "phase": trace.events.phase_at(later[0] + int(live[later[0] :].argmax())),
        "traced_blocks": trace.traced_blocks,
        "remarks": list(trace.remarks),
        "seconds": round(time.process_time() - started, 2),
    }
