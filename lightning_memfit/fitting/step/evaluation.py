"""`EvaluationSplitter`: splits batches of validation, test and prediction after one has run out of memory.

Before the first split it checks on some of the samples that parts give what the whole gives: a metric over the batch
(retrieval within it, a perplexity, a correlation) would change silently.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_memfit.fitting.recovery.retry import MemoryExhausted, Outcome, outcome_of, raise_failure
from lightning_memfit.fitting.recovery.rollback import MetricStates, RandomState, TrainingSnapshot
from lightning_memfit.fitting.recovery.step_state import (
    MODULE_INTERNALS,
    Place,
    Saved,
    alike,
    held,
    hidden_metrics,
    places_of,
    reading_of,
    restore_all,
)
from lightning_memfit.fitting.step.log_rules import metric_values
from lightning_memfit.fitting.step.loss_weights import LossWeights
from lightning_memfit.fitting.step.noise import SameNoise
from lightning_memfit.fitting.step.outputs import StepLogs, StepMetrics, merge
from lightning_memfit.fitting.step.split import BatchGuard, BatchSplitter, sizes_of, with_own_tensors
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.ledger import tensors_among
from lightning_memfit.memory.oom import release
from lightning_memfit.memory.state import is_random_source
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.consensus import (
    At,
    PeerFailed,
    RankConsensus,
    require_as_many_batches,
)

_LIMITS = {
    "validation_step": "limit_val_batches",
    "test_step": "limit_test_batches",
    "predict_step": "limit_predict_batches",
}
_EXACT, _TOLERANCE, _LOW_PRECISION = 1e-9, 1e-3, 3e-2  # TF32 rounds to the second

_Run = Callable[[Any], Any]
"""An evaluation step as a function of the batch alone."""


class EvaluationSplitter:
    """Runs evaluation steps on as many samples at once as fit.

    A batch is tried whole at first. When memory runs out, it is repeated in smaller parts, and the size is remembered
    for the kind of step. Outputs are merged: scalars by their weighted mean, tensors of samples by
    concatenation. Values with `sync_dist=True` are reduced once per batch, after all parts. Nothing else is exchanged
    between ranks, unless they share the module: then all of them cut a batch alike.

    Before a step is split for the first time, half of the samples that failed are run at once and in unequal parts.
    What they return, log and add to metrics must agree, with the same noise for every sample.

    Args:
        trainer: The trainer.
        module: The module.
        splitter: Splits batches.
        weights: Returns what weighs their parts; called with the first batch.
        sizes: Sizes to start with, by the name of the step, for example those of the last run.
        allow_batch_statistics: Whether values may change when batches are split.
        ranks: Returns what ranks agree by; called with the first batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        splitter: BatchSplitter,
        weights: Callable[[], LossWeights],
        sizes: dict[str, int],
        allow_batch_statistics: bool,
        ranks: Callable[[], RankConsensus],
    ) -> None:
        self._find_ranks = ranks
        self._trainer = trainer
        self._module = module
        self._splitter = splitter
        self._find_weights = weights
        self.sizes = sizes
        self._checked: set[_Kind] = set()
        self._kind: _Kind = ("", 0)
        self._guards: dict[_Kind, BatchGuard] = {}
        self._undo: list[Callable[[], None]] = []
        self._allows_changes = allow_batch_statistics

    def install(self) -> None:
        """Guard the strategy's evaluation steps."""
        self._undo = [wrap_method(self._trainer.strategy, name, partial(self._run, name)) for name in _LIMITS]

    def uninstall(self) -> None:
        """Guard them no more."""
        while self._undo:
            self._undo.pop()()

    def _run(self, name: str, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        def one(part: Any) -> Any:
            return step(part, *args, **kwargs)

        point = (
            RandomState(self._trainer.strategy.root_device),
            self._states.save(),
            self._attributes(),
            self._module._current_fx_name,
        )
        self._kind = name, self._loader(name, args)
        ranks, guard = self._ranks, self._guards.setdefault(self._kind, BatchGuard(name))
        kept = guard.keep(batch)
        count: int | None = None
        while True:
            is_cut = name in self.sizes  # then ranks may run different numbers of parts
            count = self._splitter.count(batch) if count is None and is_cut else count
            if count is not None and self._is_to_check(ranks, count, name):  # of another loader, or in another run
                self._check(name, one, batch, count, count // 2 if count > 3 else count, ranks)
            logs = StepLogs()
            run = partial(self._run_once, name, one, batch, count if is_cut else None, logs)
            output, failure = ranks.together(run, None if is_cut else (name,), is_risky=is_cut)
            if not _has_run_out(name, ranks, failure, self._progress(name)):
                results = self._results(name)
                if results is not None:  # not before: what one rank has done counts if all have
                    logs.commit(results)
                guard.learn(kept)
                return output
            count = self._splitter.count(kept.batch) if count is None else count
            failed = min(self.sizes.get(name, count), count)
            if failed <= 1:
                message = str(failure or "on another rank").split("\n")[0]
                way_out = _kept_results(self._module, name) or "Shorter samples or a smaller model would."
                raise MemoryExhausted(f"One sample does not fit in `{name}`. {way_out} {message}") from failure
            if failure is not None:
                release(failure)
            del failure, run
            random, states, attributes, hook_name = point
            restore_all(attributes, self._own_places())
            self._module._current_fx_name = hook_name
            random.restore()
            self._states.load(states)
            batch = guard.restored(kept)
            if self._is_to_check(ranks, count, name):
                self._check(name, one, batch, count, count // 2, ranks)
            self.sizes[name] = max(1, failed // 2)
            # Nothing predicts evaluation: that a batch is cut is how the size is found, and its values stay the same.
            rank_zero_info(
                f"MicroBatching: memory ran out in `{name}` with {failed} samples; {self.sizes[name]} at once."
            )

    def _loader(self, name: str, args: Any) -> int:
        """Index of the loader that a batch is from."""
        if name == "predict_step":  # whose results are not logged; with several loaders the index is an argument
            return int(args[-1]) if self._trainer.predict_loop.num_dataloaders > 1 and args else 0
        return int(self._results(name).dataloader_idx or 0)

    def _is_to_check(self, ranks: RankConsensus, count: int, name: str) -> bool:
        """Whether a batch is about to be split, and none of its kind was compared in this run; on all ranks alike."""
        if self._kind in self._checked:
            return False
        is_due = count > self.sizes.get(name, 0)
        return ranks.any_of([is_due])[0] if ranks.stops_together else is_due

    def _progress(self, name: str) -> Any:
        """Lightning's counter of the batches that are evaluated now."""
        trainer = self._trainer
        if name == "predict_step":
            return trainer.predict_loop.batch_progress
        if name == "test_step":
            return trainer.test_loop.batch_progress
        is_fit = trainer.state.fn == TrainerFn.FITTING
        return (trainer.fit_loop.epoch_loop.val_loop if is_fit else trainer.validate_loop).batch_progress

    @cached_property
    def _weights(self) -> LossWeights:
        return self._find_weights()

    @cached_property
    def _metrics(self) -> StepMetrics:
        return StepMetrics(self._module)  # not before the first batch: the module's own `setup` may make some

    @cached_property
    def _states(self) -> MetricStates:
        return MetricStates(self._module)

    @cached_property
    def _ranks(self) -> RankConsensus:
        return self._find_ranks()

    def _run_once(self, name: str, one: _Run, batch: Any, count: int | None, logs: StepLogs) -> Any:
        """Run a batch, whole or as many samples at once as fit, and collect in `logs` what it logs."""
        if count is not None and count > self.sizes[name]:
            return self._run_split(name, one, batch, count, self.sizes[name], logs)
        with self._captured(name, logs):
            return one(batch)

    def _captured(self, name: str, logs: StepLogs) -> AbstractContextManager[None]:
        results = self._results(name)
        return nullcontext() if results is None else logs.capture(results)

    def _run_split(self, name: str, one: _Run, batch: Any, count: int, micro_batch_size: int, logs: StepLogs) -> Any:
        """Run a batch in parts, collect in `logs` what they log, and return the merged outputs."""
        sizes = sizes_of(count, micro_batch_size)
        parts = self._splitter.split(batch, sizes)
        weights = self._weights.read(batch, count).weights_of(parts, sizes)
        self._metrics.begin()
        outputs = []
        try:
            for part, weight, size in zip(parts, weights, sizes, strict=True):
                logs.begin_part(weight, size)
                with self._captured(name, logs):
                    outputs.append(one(part))
        finally:
            self._metrics.end()
        self._metrics.finish(logs.metrics_on_step())
        return merge(outputs, weights, sizes)

    def _results(self, name: str) -> Any:
        """Lightning's collection that the step logs to; None if it can't log."""
        return None if name == "predict_step" else self._trainer._results

    # --- the check --------------------------------------------------------------------------------------------------

    def _check(self, name: str, one: _Run, batch: Any, count: int, size: int, ranks: RankConsensus) -> None:
        """Check on a number of samples of a batch, or as many as fit, that parts give what the whole gives.

        Raises:
            MisconfigurationException: If they don't.
        """
        self._checked.add(self._kind)
        found: list[str] | None = None
        while size > 1:
            part = batch if size == count else self._splitter.split(batch, [size, count - size])[0]
            found, failure = ranks.together(partial(self._differences, name, one, part, size))
            if not _has_run_out(name, ranks, failure, self._progress(name)):
                break
            if failure is not None:
                release(failure)
            del failure
            size //= 2
        if ranks.stops_together and ranks.any_of([bool(found)])[0] and not found:
            raise PeerFailed(f"Another rank found that `{name}` can't be split; see its error. This rank stops, too.")
        if found is None and not self._allows_changes:
            rank_zero_warn(f"Two samples do not fit in `{name}`: nobody knows whether its values depend on the batch.")
        elif found and not self._allows_changes:
            raise MisconfigurationException(
                f"Memory ran out in `{name}` with {count} samples, and it can't be split: with {size} samples at once "
                f"and in parts, {'; '.join(found)}. Give its loader a smaller `batch_size`, collect the metric over "
                "the epoch with torchmetrics, pass `self.log` the `batch_size` that a mean is over, or accept the "
                "change: `MicroBatching(allow_batch_statistics=True)`."
            )

    def _differences(self, name: str, one: _Run, part: Any, size: int) -> list[str]:
        """Run samples at once and in unequal parts, and return in words what differs."""
        device = self._trainer.strategy.root_device
        snapshot = TrainingSnapshot(self._module, device, with_parameters=False)
        tolerance = _LOW_PRECISION if "16" in str(self._trainer.precision) else 0.0

        def run(micro_batch_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
            snapshot.restore()
            noise = SameNoise()
            noise.begin_part()
            with noise:
                values = self._values(name, one, with_own_tensors(part), size, micro_batch_size)
            return values, self._readings()

        try:
            whole = run(size)
            parts = run(size - max(1, size // 3))
        finally:
            snapshot.restore()
        different, others = (_unlike(*pair, tolerance) for pair in zip(whole, parts, strict=True))
        if others and not different:
            rank_zero_warn(
                f"`{name}` changes {', '.join(f'`{key}`' for key in sorted(others))} of the module per part of a batch "
                "that is split: not what the whole batch would make of it. What the epoch logs of it may be other "
                "values; `self.log` and torchmetrics give those of the whole batch."
            )
        return [f"{key} is {_short(whole[0].get(key))} and {_short(parts[0].get(key))}" for key in sorted(different)]

    def _readings(self) -> dict[str, Any]:
        """What the module's attributes hold."""
        values = {name: place.read() for name, place in places_of(self._module).items()}
        return {name: reading_of(value) for name, value in values.items() if not is_random_source(value)}

    def _attributes(self) -> Saved:
        """Save what the module itself holds, which may be the outputs of an epoch."""
        return held(self._own_places().values())

    def _own_places(self) -> dict[str, Place]:
        return {name: place for name, place in places_of(self._module).items() if "." not in name}

    def _values(self, name: str, one: _Run, batch: Any, count: int, size: int) -> dict[str, Any]:
        """What samples return, log and add to metrics, in words; nothing reaches Lightning."""
        for _, metric in (*self._module.named_modules(), *hidden_metrics(self._module)):
            if isinstance(metric, Metric):
                metric.reset()
        logs = StepLogs()
        values = _leaves(reading_of(self._run_split(name, one, batch, count, size, logs)), "what it returns")
        logs.fold()
        values |= {f"`self.log({c.name!r})`": c.value.cpu() for c in logs.calls if not isinstance(c.value, Metric)}
        for path, value in metric_values(self._module).items():
            values |= _leaves(reading_of(value), f"the metric `{path}`")
        return values


def _has_run_out(name: str, ranks: RankConsensus, failure: Exception | None, progress: Any) -> bool:
    """Whether memory has run out in a step: on this rank, or on one that communicates with it in the step.

    Args:
        name: Name of the step.
        ranks: What ranks agree by.
        failure: What the step has ended in on this rank.
        progress: Lightning's counter of the batches.

    Raises:
        MisconfigurationException: If this batch is the last one on some of the ranks that share the module.
        Exception: If a rank failed for a reason other than memory; on that rank the same exception.
    """
    outcome = outcome_of(failure)
    if not ranks.stops_together:
        if failure is not None and (outcome == Outcome.FAILED or ranks.meets_inside):
            raise failure
        return outcome == Outcome.OUT_OF_MEMORY
    sent = ranks.exchange(outcome, progress.is_last_batch, at=At.EVALUATED)
    told = [theirs for theirs, _ in sent]
    raise_failure(ranks, told, outcome, failure, f"in `{name}`")
    if Outcome.OUT_OF_MEMORY in told:
        ranks.start_anew()
        return True
    require_as_many_batches([last for _, last in sent], progress.current.ready, _LIMITS[name])
    return False


_Kind = tuple[str, int]
"""The name of a step, and the index of the loader: what a step computes may depend on it."""

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


def _leaves(reading: Any, path: str) -> dict[str, Any]:
    """What a reading holds, by where it is."""
    if not isinstance(reading, (dict, list)):
        return {path: reading}
    items = reading.items() if isinstance(reading, dict) else enumerate(reading)
    return {name: leaf for key, item in items for name, leaf in _leaves(item, f"{path}[{key!r}]").items()}


def _unlike(some: dict[str, Any], others: dict[str, Any], tolerance: float) -> set[str]:
    """Names of what differs by more than rounding."""
    return {key for key in {**some, **others} if not _are_close(some.get(key), others.get(key), tolerance)}


def _are_close(one: Any, other: Any, tolerance: float) -> bool:
    pair = (one, other)
    is_exact = all(isinstance(value, Tensor) and value.dtype == torch.float64 for value in pair)
    tolerance = max(tolerance, _EXACT if is_exact else _TOLERANCE)
    if all(isinstance(value, (Tensor, float)) for value in pair):
        one, other = (torch.as_tensor(value, dtype=torch.float64) for value in pair)
        if one.shape == other.shape and one.numel() and float((one - other).abs().max()) <= tolerance * _TOLERANCE:
            return True  # both are nothing but rounding
    return alike(one, other, tolerance)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (float, int)):
        return f"{value:.6g}"
    return "missing" if value is None else f"a {type(value).__name__}"
