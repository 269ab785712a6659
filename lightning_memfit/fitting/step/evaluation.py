"""`EvaluationSplitter`: splits batches of validation, test and prediction after one has run out of memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memfit.fitting.recovery.retry import MemoryExhausted, Outcome, outcome_of, tell
from lightning_memfit.fitting.recovery.rollback import MetricStates, RollbackPoint
from lightning_memfit.fitting.recovery.step_state import MODULE_INTERNALS, Place, held, places_of, remove_new
from lightning_memfit.fitting.step.loss_weights import LossWeights
from lightning_memfit.fitting.step.outputs import ComputeGroups, StepLogs, merge
from lightning_memfit.fitting.step.split import BatchGuard, BatchSplitter, sizes_of
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.ledger import tensors_among
from lightning_memfit.memory.oom import release
from lightning_memfit.reliability.consensus import At, RankConsensus, require_as_many_batches

LIMITS = {
    "validation_step": "limit_val_batches",
    "test_step": "limit_test_batches",
    "predict_step": "limit_predict_batches",
}
"""Evaluation steps of a strategy, with the Trainer's arguments that limit their batches."""


class EvaluationSplitter:
    """Runs evaluation steps on as many samples at once as fit.

    A batch is tried whole at first. When memory runs out, it is repeated in smaller parts, and the size is remembered
    for the kind of step. What parts return and log is merged as in training: metric objects see every sample, scalars
    become means, tensors of samples are concatenated. A value that is neither, such as a perplexity, becomes the mean
    over parts. Values with `sync_dist=True` are reduced once per batch, after all parts. Nothing else is exchanged
    between ranks, unless they share the module: then all of them cut a batch alike.

    It is made at the first batch: the module's own `setup` may make metrics, losses and ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        splitter: BatchSplitter,
        weights: LossWeights,
        ranks: RankConsensus,
        sizes: dict[str, int],
    ) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._splitter, self._weights, self._ranks = splitter, weights, ranks
        self._groups, self._states = ComputeGroups(self._module), MetricStates(self._module)
        self._guards: dict[str, BatchGuard] = {}
        self.sizes = sizes

    def run(self, name: str, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of a strategy, in parts if it doesn't fit, and again in smaller ones if memory runs out."""

        def one(part: Any) -> Any:
            return step(part, *args, **kwargs)

        ranks, guard = self._ranks, self._guards.setdefault(name, BatchGuard(name))
        own, device = held(self._own_places().values()), self._trainer.strategy.root_device
        start = RollbackPoint(self._module, device, self._states, own)
        kept = guard.keep(batch)
        while True:
            size = self.sizes.get(name)  # where there is one, ranks may run different numbers of parts
            logs = StepLogs()
            run = partial(self._run_once, name, one, batch, size, logs)
            output, failure = ranks.together(run, None if size else (name,), is_risky=bool(size))
            if not _has_run_out(name, ranks, failure, self._progress(name)):
                if name != "predict_step":  # not before: what one rank has done counts if all have
                    logs.commit(self._trainer._results)
                guard.learn(kept)
                return output
            failed = self._failed(name, kept.batch, size, failure)
            if failure is not None:
                release(failure)
            del failure, run
            remove_new(own, self._own_places())
            start.load()
            batch = guard.restored(kept)
            self.sizes[name] = failed // 2
            # Nothing predicts evaluation: that a batch is cut is how the size is found.
            rank_zero_info(
                f"MicroBatching: memory ran out in `{name}` with {failed} samples; {failed // 2} at once. Values that "
                "are no means over samples or torchmetrics objects are now means over parts."
            )

    def _failed(self, name: str, batch: Any, size: int | None, failure: Exception | None) -> int:
        """Return how many samples at once didn't fit.

        Raises:
            torch.OutOfMemoryError: If it was one, or the batch can't be cut.
        """
        message = str(failure or "on another rank").split("\n")[0]
        try:
            count = self._splitter.count(batch)
        except ValueError as error:
            raise MemoryExhausted(f"Memory ran out in `{name}`, whose batch can't be cut. {error} {message}") from error
        failed = min(size or count, count)
        if failed <= 1:
            way_out = _kept_results(self._module, name) or "Shorter samples or a smaller model would."
            raise MemoryExhausted(f"One sample does not fit in `{name}`. {way_out} {message}") from failure
        return failed

    def _run_once(self, name: str, one: Callable[[Any], Any], batch: Any, size: int | None, logs: StepLogs) -> Any:
        """Run a batch, whole or as many samples at once as fit, and collect in `logs` what it logs."""
        sizes = [1] if size is None else sizes_of(self._splitter.count(batch), size)
        parts, weights = [batch], [1.0]
        if len(sizes) > 1:
            parts = self._splitter.split(batch, sizes)
            weights = self._weights.read(batch, sum(sizes)).weights_of(parts, sizes)
            self._groups.begin()
        outputs = []
        try:
            for part, weight, num_samples in zip(parts, weights, sizes, strict=True):
                logs.begin_part(weight, num_samples)
                if name == "predict_step":  # which can't log
                    outputs.append(one(part))
                else:
                    with logs.capture(self._trainer._results):
                        outputs.append(one(part))
        finally:
            self._groups.end()
        self._groups.compare()
        return merge(outputs, weights, sizes)

    def _progress(self, name: str) -> Any:
        """Lightning's counter of the batches that are evaluated now."""
        trainer: Any = self._trainer
        is_fit = trainer.state.fn == TrainerFn.FITTING
        validating = trainer.fit_loop.epoch_loop.val_loop if is_fit else trainer.validate_loop
        loops = {"predict_step": trainer.predict_loop, "test_step": trainer.test_loop}
        return loops.get(name, validating).batch_progress

    def _own_places(self) -> dict[str, Place]:
        """Places of what the module itself holds, which may be the outputs of an epoch."""
        return {name: place for name, place in places_of(self._module).items() if "." not in name}


def _has_run_out(name: str, ranks: RankConsensus, failure: Exception | None, progress: Any) -> bool:
    """Whether memory has run out in a step: on this rank, or on one that communicates with it in the step.

    Raises:
        MisconfigurationException: If this batch is the last one on some of the ranks that share the module.
        Exception: If a rank failed for a reason other than memory; on that rank the same exception.
    """
    outcome = outcome_of(failure)
    if not ranks.stops_together:
        if failure is not None and (outcome == Outcome.FAILED or ranks.meets_inside):
            raise failure
        return outcome == Outcome.OUT_OF_MEMORY
    told = tell(ranks, outcome, failure, f"in `{name}`", progress.is_last_batch, at=At.EVALUATED)
    if any(theirs == Outcome.OUT_OF_MEMORY for theirs, _ in told):
        ranks.start_anew()
        return True
    require_as_many_batches([last for _, last in told], progress.current.ready, LIMITS[name])
    return False


_MUCH_KEPT = 0.1
"""Share of the weights' bytes from which on kept results are named as what fills the memory."""


def _kept_results(module: LightningModule, name: str) -> str:
    """Say which list of the module's keeps much of the device's memory; empty if none does.

    Steps that keep results on the device until the epoch ends run out of memory late: Lightning's issues 5735 and 8453.
    """
    kept = {
        f"self.{name}" + (f"[{key!r}]" if isinstance(value, dict) else ""): sum(
            tensor.nbytes for tensor in tensors_among(items) if tensor.device == module.device
        )
        for name, value in vars(module).items()
        if name not in MODULE_INTERNALS
        for key, items in (value.items() if isinstance(value, dict) else ((name, value),))
        if type(items) is list
    }
    where = max(kept, key=kept.__getitem__, default="")
    if kept.get(where, 0) < _MUCH_KEPT * sum(parameter.nbytes for parameter in module.parameters()):
        return ""
    return (
        f"But `{where}` keeps {format_bytes(kept[where])} of earlier batches on the device: keep results in host "
        f"memory (`.cpu()`), or what `{name}` needs of them at the end of the epoch (a torchmetrics metric)."
    )
