"""`Passes`: forward and backward over some samples that leave no trace, and what shows whether they are the same."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric
from typing_extensions import override

from lightning_memfit.fitting.recovery.rollback import TrainingSnapshot
from lightning_memfit.fitting.recovery.step_state import (
    Saved,
    changed_since,
    copies_frozen_weights,
    held,
    hidden_metrics,
    places_of,
    put_back,
    reading_of,
    remove_new,
    sampled_weights,
)
from lightning_memfit.fitting.step.accumulation import Accumulation
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.noise import SameNoise, without_recurrent_dropout
from lightning_memfit.fitting.step.outputs import LogCall, StepOutputs
from lightning_memfit.fitting.step.split import with_own_tensors
from lightning_memfit.memory.comparison import CHUNK, NUM_PROJECTIONS, projected, signs
from lightning_memfit.memory.float32_products import exact_products
from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.reliability.upstream.deepspeed import held_weight
from lightning_memfit.techniques.core.facts import batch_statistics

_MOVED = 0.01

_OWN_SEED = (
    "`training_step` sets the seed of random numbers and draws some: every micro-batch would draw the same ones, which "
    "the samples of the whole batch don't. Seed once, before training, or keep the whole share in one micro-batch."
)
_NOT_ALONE = (
    "`training_step` can't be run on {} samples of the batch alone: {}: {}. Parts are as wide as the batch: a module "
    "that needs the longest of its samples, as packed sequences do, or whose samples lie elsewhere than in the first "
    "dimension (graphs, lists of parts), says how to cut a batch by `split_batch(batch, sizes)` on the LightningModule."
)


_NORMALISED = (
    "{} BatchNorm layers ({}{}) normalise with the statistics of their batch: with micro-batches they are those of the "
    "micro-batch, and results change. Replace them by GroupNorm or LayerNorm, freeze them with `.eval()`, or accept "
    "that they see a micro-batch only: `MicroBatching(allow_batch_statistics=True)`."
)


def normalised(layers: list[str]) -> str:
    """Say that layers normalise with the statistics of their batch."""
    return _NORMALISED.format(len(layers), ", ".join(layers[:3]), ", ..." if len(layers) > 3 else "")


class NotFiniteError(Exception):
    """Gradients are infinite, NaN or all zero, so that nothing can be told from them."""


class PartFailedError(MisconfigurationException):
    """A part of the batch can't be run alone, for another reason than memory."""


@dataclass
class Pass:
    """What one pass over some samples gave."""

    sketch: Tensor
    """Projections of the gradients, (parameters + 1, projections) in float64; the last row is the loss."""
    after: dict[str, Any]
    """Readings of what the step writes on the module, by name."""
    weights: dict[str, Tensor]
    """Samples of the weights in training after it."""
    logs: list[LogCall]
    metrics: dict[str, Any]
    """What the module's metrics would compute after it."""
    least_bits: int
    """Width of the least exact numbers that were computed."""

    @property
    def is_finite(self) -> bool:
        """Whether all gradients and the loss are finite."""
        return bool(torch.isfinite(self.sketch).all())

    @property
    def shows(self) -> bool:
        """Whether anything can be told from the gradients."""
        return self.is_finite and bool(self.sketch[:-1].any())


class Passes:
    """Runs samples together and in parts, by the code that training runs.

    Attributes:
        ignored: Entries of labels that losses were told to leave out.
        changed_weights: Names of weights in training that steps were seen to write.
        logger_names: Names under which steps have written to the loggers themselves.
    """

    def __init__(self, loop: MicroBatchLoop, accumulation: Accumulation, holds_statistics: bool) -> None:
        self._loop = loop
        self._accumulation = accumulation
        self._holds_statistics = holds_statistics
        self._snapshot: TrainingSnapshot
        self.ignored: set[int] = set()
        self.changed_weights: set[str] = set()
        self.logger_names: set[str] = set()

    @contextmanager
    def undone(self, autocast: bool) -> Iterator[None]:
        """Run passes that leave no trace."""
        module, trainer, accumulation = self._loop.module, self._loop.trainer, self._accumulation
        with ExitStack() as stack:
            loggers = stack.enter_context(_silenced(trainer))
            stack.enter_context(without_recurrent_dropout(module))
            stack.enter_context(exact_products())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # Scales at which gradients may overflow are left out, and autocast if the module can do without: gradients
            # of 16 bits differ by more than many a wrong weight.
            changed: dict[str, Any] = {} if autocast else {"forward_context": nullcontext}
            if isinstance(trainer.precision_plugin, MixedPrecision):
                changed["scaler"] = None
            stack.enter_context(patch.dict(vars(trainer.precision_plugin), changed))
            self._settle()
            self._snapshot = TrainingSnapshot(module, trainer.strategy.root_device)
            try:
                if self._holds_statistics:
                    for child in module.modules():
                        if isinstance(child, _BatchNorm) and child.running_mean is not None:
                            child.eval()
                move_weights(module)
                yield
            finally:
                accumulation.before_forward = None
                for parameter in module.parameters():
                    parameter.grad = None
                self._settle()
                self._snapshot.restore()
                del self._snapshot  # which holds gradients
                self.logger_names.update(name for logger in loggers for name in logger.names)
                for callback in trainer.callbacks:  # type: ignore[attr-defined]
                    if reset := getattr(callback, "reset_peak", None):  # of a `MemoryMonitor`
                        reset()

    def _settle(self) -> None:
        """Divide what a pass has left gathered, so that the next one begins with the weights that are put back."""
        if self._loop.engine is not None:
            self._loop.engine.settle()

    def state(self) -> Saved:
        """Return what is on the module now."""
        module = self._loop.module
        return held(places_of(module).values(), copies_frozen_weights(module))

    def run(
        self,
        request: StepRequest,
        parts: Sequence[Any],
        sizes: list[int],
        shares: list[float],
        start: Saved,
        num_samples: int,
    ) -> Pass:
        """Run samples in parts, whose losses are multiplied by shares, from a state of the module.

        Raises:
            PartFailedError: If fewer samples than the batch has fail for another reason than memory.
        """
        loop, module, snapshot = self._loop, self._loop.module, self._snapshot
        remove_new(start, places_of(module))
        put_back(start)
        snapshot.restore_metrics()
        for parameter in module.parameters():
            parameter.grad = None
        self._settle()
        before = sampled_weights(module)
        noise, outputs, sketches = SameNoise(), StepOutputs(module, loop.results), Sketches(module)

        def begin_part() -> None:
            snapshot.restore_random()
            noise.begin_part()

        self._accumulation.before_forward = begin_part
        own = [with_own_tensors(part) for part in parts]
        divisors = [1.0 / share if share else 1.0 for share in shares]
        try:
            with noise:
                result = self._accumulation.run(request, own, sizes, shares, divisors, outputs, start)
        except Exception as error:
            is_part = len(parts) > 1 or sizes[0] < num_samples
            if not is_part or is_out_of_memory(error) or isinstance(error, MisconfigurationException):
                raise
            why = _NOT_ALONE.format(min(sizes), type(error).__name__, error)
            if isinstance(error, ValueError) and not self._holds_statistics:  # what batch norms raise of one sample
                why += "".join(f" {normalised(found)}" for found in [batch_statistics(module)] if found)
            raise PartFailedError(why) from error
        finally:
            sketches.remove()
        loss = outputs.loss if len(parts) > 1 else result.loss
        self.ignored |= noise.ignored
        if noise.repeats or (noise.num_draws and snapshot.is_seeded_anew):
            raise MisconfigurationException(_OWN_SEED)
        accumulation = self._accumulation
        written = changed_since(start, module)
        if written.keys() - accumulation.written.keys():
            accumulation.written |= written
            if len(parts) > 1:  # micro-batches must begin without it
                return self.run(request, parts, sizes, shares, start, num_samples)
        after = sampled_weights(module)
        found = Pass(
            sketches.matrix(0.0 if loss is None else float(loss)),
            {name: reading_of(place.read()) for name, place in written.items()},
            after,
            outputs.logs.calls,
            metric_values(module),
            noise.least_bits,
        )
        if changed := [name for name, one in before.items() if not one.equal(after[name])]:
            self.changed_weights.update(changed)
            snapshot.restore_weights()
            move_weights(module)
        return found


def metric_values(module: nn.Module) -> dict[str, Any]:
    """Return what every updated metric of a module would compute now, on this rank alone; the metrics stay as they are.

    Those that can't compute yet are left out.
    """
    values: dict[str, Any] = {}
    for name, metric in (*module.named_modules(), *hidden_metrics(module)):
        if not isinstance(metric, Metric) or not metric.update_called:
            continue
        before = metric._computed, metric._to_sync
        try:
            metric._computed, metric._to_sync = None, False
            with torch.no_grad():
                values[name] = reading_of(metric.compute())
        except Exception:  # nosec B112  # too few samples for this metric: nothing to compare
            continue
        finally:
            metric._computed, metric._to_sync = before
    return values


# --- surroundings of a pass -------------------------------------------------------------------------------------------


class _SilentLogger(DummyLogger):
    """Writes nothing, and remembers the names that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @override
    def log_metrics(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        """Remember the names."""
        self.names.update(metrics)


@contextmanager
def _silenced(trainer: Trainer) -> Iterator[list[_SilentLogger]]:
    """Give the module loggers that write nothing, for steps that are not part of training."""
    before = trainer.loggers
    silent = [_SilentLogger() for _ in before]
    trainer.loggers = silent  # type: ignore[assignment]
    try:
        yield silent
    finally:
        trainer.loggers = before


# --- gradients without copies of them --------------------------------------------------------------------------------


def move_weights(module: nn.Module) -> None:
    """Move every trained weight by about one per cent of its size: heads and adapters that are zero take part then."""
    with torch.no_grad(), _disable_current_modes():
        for parameter in module.parameters():
            data = held_weight(parameter).data
            if not parameter.requires_grad or not data.is_floating_point() or type(data) is not Tensor:
                continue
            values = data.view(-1) if data.is_contiguous() else data.flatten()[:0]
            scale = _MOVED * float(values.float().std()) if values.numel() > 1 else 0.0
            for chunk in values.split(CHUNK):
                chunk.add_(signs(chunk.device)[: len(chunk)], alpha=scale or _MOVED)


class Sketches:
    """Random projections of gradients, read as they are made: some techniques free them at once."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._rows: dict[int, Tensor] = {}
        self._handles = [p.register_hook(self._hook(index)) for index, p in enumerate(self._parameters)]

    def _hook(self, index: int) -> Any:
        def add(gradient: Tensor) -> None:
            found = projected(gradient)
            self._rows[index] = self._rows[index] + found if index in self._rows else found

        return add

    def remove(self) -> None:
        """Read gradients no more."""
        for handle in self._handles:
            handle.remove()

    def matrix(self, loss: float) -> Tensor:
        """Return the projections, (parameters + 1, projections) in float64 on the CPU; the last row is the loss."""
        rows = []
        for index, parameter in enumerate(self._parameters):
            # What hooks left of it, unless it was freed at once, as some techniques do.
            found = self._rows.get(index) if parameter.grad is None else projected(parameter.grad)
            rows.append(torch.zeros(NUM_PROJECTIONS, dtype=torch.float64) if found is None else found)
        last = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64)
        last[0] = loss
        return torch.stack([*rows, last])
