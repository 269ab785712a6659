"""Peaks of ranks as traces predict them."""

import time
import warnings
from typing import Any

from benchmarks.sharded_traces.cases import Case


def predict(case: Case) -> dict[str, Any]:
    """Predicted peak of the rank after its first step, and where it is."""
    from lightning_memfit.profile.quiet import LIGHTNING, loggers_at
    from lightning_memfit.profile.ranks import Ranks
    from lightning_memfit.profile.step import StepOptions
    from lightning_memfit.profile.trace import Emulation, TraceError, trace_step

    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, batch = case.make()
        ranks = Ranks(case.make_strategy, case.world_size, case.rank)
        options = StepOptions(case.precision, case.accumulate)
        started = time.process_time()
        try:
            trace = trace_step(
                module, batch, options, Emulation("cpu"), case.make_callbacks(), check_assumptions=False, ranks=ranks
            )
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
