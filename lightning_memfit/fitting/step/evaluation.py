"""`EvaluationSplitter`: splits batches of validation, test and prediction after one has run out of memory."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.fitting.recovery.oom import is_out_of_memory, release
from lightning_memfit.fitting.recovery.rollback import MetricStates, RandomState
from lightning_memfit.fitting.step.outputs import StepLogs, StepMetrics, merge
from lightning_memfit.fitting.step.split import BatchSplitter

_STEPS = ("validation_step", "test_step", "predict_step")


class EvaluationSplitter:
    """Runs evaluation steps on as many samples at once as fit.

    A batch is tried whole at first. When memory runs out, it is repeated in smaller parts, and the size is remembered
    for the kind of step. Outputs are merged: scalars by their weighted mean, tensors of samples by
    concatenation. Nothing is exchanged between ranks; values with `sync_dist=True` are reduced once per batch, after
    all parts.

    Args:
        trainer: The trainer.
        module: The module.
        splitter: Splits and weighs batches.
        sizes: Sizes to start with, by the name of the step, for example those of the last run.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        splitter: BatchSplitter,
        sizes: dict[str, int],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._splitter = splitter
        self.sizes = sizes
        self._metrics = StepMetrics(module)
        self._states = MetricStates(module)
        self._replaced: dict[str, tuple[Any, Any]] = {}
        self._is_installed = False

    def install(self) -> None:
        """Replace the strategy's evaluation steps."""
        strategy = self._trainer.strategy
        self._is_installed = True
        for name in _STEPS:
            before = vars(strategy).get(name)
            ours = self._split_step(name, getattr(strategy, name))
            setattr(strategy, name, ours)
            self._replaced[name] = (ours, before)

    def uninstall(self) -> None:
        """Restore the strategy's steps. If somebody has wrapped ours since, ours stays and does nothing."""
        self._is_installed = False
        strategy = self._trainer.strategy
        for name, (ours, before) in self._replaced.items():
            if vars(strategy).get(name) is not ours:
                continue
            if before is None:
                delattr(strategy, name)
            else:
                setattr(strategy, name, before)
        self._replaced = {}

    def _split_step(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def split_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_installed:
                return step(batch, *args, **kwargs)
            point = (
                RandomState(self._trainer.strategy.root_device),
                self._states.save(),
                self._module._current_fx_name,
            )
            count: int | None = None
            while True:
                try:
                    if name not in self.sizes:
                        return self._run_whole(name, step, batch, args, kwargs)
                    count = self._splitter.count(batch) if count is None else count
                    return self._run_parts(name, step, batch, args, kwargs, count)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = error
                count = self._splitter.count(batch) if count is None else count
                failed = min(self.sizes.get(name, count), count)
                if failed <= 1:
                    raise failure
                release(failure)
                del failure
                random, states, self._module._current_fx_name = point
                random.restore()
                self._states.load(states)
                self.sizes[name] = max(1, failed // 2)
                rank_zero_warn(f"Memory ran out in `{name}` with {failed} samples; going on with {self.sizes[name]}.")

        return split_step

    def _run_whole(self, name: str, step: Callable[..., Any], batch: Any, args: Any, kwargs: Any) -> Any:
        results = None if name == "predict_step" else self._trainer._results
        if results is None:
            return step(batch, *args, **kwargs)
        logs = StepLogs()
        with logs.capture(results):
            output = step(batch, *args, **kwargs)
        logs.commit(results)
        return output

    def _run_parts(self, name: str, step: Callable[..., Any], batch: Any, args: Any, kwargs: Any, count: int) -> Any:
        if count <= self.sizes[name]:
            return self._run_whole(name, step, batch, args, kwargs)
        local_batch = self._splitter.read(batch, count)
        parts, sizes, weights = self._splitter.micro_batches(batch, local_batch, self.sizes[name])
        results = None if name == "predict_step" else self._trainer._results
        logs = StepLogs()
        self._metrics.begin()
        outputs = []
        try:
            for part, weight in zip(parts, weights, strict=True):
                logs.weight = weight
                if results is None:
                    outputs.append(step(part, *args, **kwargs))
                else:
                    with logs.capture(results):
                        outputs.append(step(part, *args, **kwargs))
        finally:
            self._metrics.end()
        self._metrics.finish(logs.metrics_on_step())
        if results is not None:
            logs.commit(results)
        return merge(outputs, weights, sizes)
