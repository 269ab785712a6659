"""The record of `MicroBatching`; the callback is in `fitting`."""

from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if batches can be cut."""
    if not run.facts.automatic_optimization:
        return "with manual optimization the module runs its own forward and backward. Use automatic optimization."
    used_up = "its gradients are used up during backward, which may have to be repeated."
    return run.beside(dict.fromkeys(("GradientRelease", "HostMasterWeights"), used_up))


TECHNIQUE = Technique(
    name="micro_batching",
    kind="batching",
    summary="cuts the effective batch into micro-batches that fit",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.MicroBatching"),),
    unsupported=unsupported,
    traced=False,
    changes_step=False,
)
