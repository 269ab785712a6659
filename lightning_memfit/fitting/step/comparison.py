"""`Comparison`: run some samples together and in two parts, from the same state, and keep what shows differences.

Gradients are kept as random projections of every parameter (a count sketch: Charikar, Chen, Farach-Colton, "Finding
frequent items in data streams", 2002), so that no copies of them are needed. Weights are moved a little meanwhile: at
initialisation teachers equal their students, and heads and adapters that start at zero hide what depends on them.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_memfit.fitting.recovery.rollback import MetricStates, TrainingSnapshot
from lightning_memfit.fitting.recovery.step_state import (
    StepState,
    alike,
    copies_of,
    find_slots,
    reading_of,
    sampled_weights,
)
from lightning_memfit.fitting.step.gradient_hooks import HooksOfBatch
from lightning_memfit.fitting.step.log_rules import LogCall, metric_values
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.noise import RecordedNoise, SlicedNoise, without_recurrent_dropout
from lightning_memfit.fitting.step.outputs import StepLogs, returned
from lightning_memfit.fitting.step.split import BatchSplitter, with_own_tensors
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.memory.float32_products import exact_products
from lightning_memfit.memory.oom import is_out_of_memory
from lightning_memfit.memory.state import is_random_source
from lightning_memfit.reliability.upstream.deepspeed import held_weight

_NUM_PROJECTIONS = 32
_CHUNK = 1 << 18
_MOVED = 0.01


@dataclass(frozen=True)
class Cut:
    """Some neighbouring samples of a batch, and where they are cut in two.

    Attributes:
        offset: Index of the first sample.
        first: Samples in the first part.
        second: Samples in the second part.
    """

    offset: int
    first: int
    second: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Samples in the two parts."""
        return self.first, self.second

    @property
    def count(self) -> int:
        """Samples in both."""
        return self.first + self.second


@dataclass
class Pass:
    """What one pass over some samples gave.

    Attributes:
        sketch: Projections of the gradients, (parameters + 1, projections) in float64; the last row is the loss.
        before: Readings of what a step may change on the module, by name.
        after: The same after the pass.
        logs: Calls of `self.log`.
        returned: The numbers that it returned beside the loss.
        metrics: What the module's metrics would compute after it.
        written: Values that the pass has changed, to go on with.
        host_random: States of Python's and NumPy's generators after the pass.
        draws_on_host: Whether it drew from one of these.
        draws_otherwise: Whether it drew something that the samples together had not drawn.
    """

    sketch: Tensor
    before: dict[str, Any]
    after: dict[str, Any]
    logs: list[LogCall]
    returned: list[LogCall]
    metrics: dict[str, Any] = field(default_factory=dict)
    metric_states: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)
    host_random: Any = None
    draws_on_host: bool = False
    draws_otherwise: bool = False

    @property
    def values(self) -> list[LogCall]:
        """All numbers that are to be those of the whole batch, though gradients don't depend on them."""
        return [*self.logs, *self.returned]

    @property
    def is_finite(self) -> bool:
        """Whether all gradients and the loss are finite."""
        return bool(torch.isfinite(self.sketch).all())


class PartFailed(MisconfigurationException):
    """A part of the batch can't be run alone, for another reason than memory."""


class Comparison:
    """Runs samples of a batch together and in two parts; use it as a context manager, which puts everything back.

    Args:
        loop: Runs forward and backward.
        request: The step.
        splitter: Splits batches.
        batch: The loader batch.
        num_samples: Its number of samples.
        cut: Which samples, and where they are cut.
        autocast: Whether to compute in mixed precision, if the run does.
        divisor: Divides the loss, so that gradients of 16 bits don't overflow; gradients are multiplied again.

    Attributes:
        parts: The two parts.
        trained: Names of the parameters in training.
        least_bits: Width of the least exact floating-point numbers seen so far.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        request: StepRequest,
        splitter: BatchSplitter,
        batch: Any,
        num_samples: int,
        cut: Cut,
        autocast: bool,
        divisor: float = 1.0,
    ) -> None:
        sizes = [cut.offset, cut.count, num_samples - cut.offset - cut.count]
        self._window = splitter.split(batch, [size for size in sizes if size])[1 if cut.offset else 0]
        self._is_whole = cut.count == num_samples
        self._loop = loop
        self._request = request
        self._autocast = autocast
        self._divisor = divisor
        self._noise = RecordedNoise(cut.count)
        self._stack = ExitStack()
        self._start: Pass | None = None
        self._metrics = MetricStates(loop.module)
        self.cut = cut
        self.parts = splitter.split(self._window, list(cut.sizes))
        self.trained = {name for name, p in loop.module.named_parameters() if p.requires_grad}
        self.least_bits = 64

    @property
    def ignored(self) -> set[int]:
        """Entries of labels that losses of the samples together were told to leave out."""
        return self._noise.ignored

    def __enter__(self) -> "Comparison":
        module, trainer = self._loop.module, self._loop.trainer
        steps_in_backward = self._loop.engine is None and any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters()
        )
        self.loggers = self._stack.enter_context(silenced(trainer))
        self._stack.enter_context(without_recurrent_dropout(module))
        self._stack.enter_context(_exact_products())
        if not self._loop.is_sharded:  # else they are called for every micro-batch
            self._stack.enter_context(HooksOfBatch(module.parameters()).aside())
        if isinstance(trainer.precision_plugin, MixedPrecision) and not self._autocast:
            self._stack.enter_context(_without_autocast(trainer))
        optimizers = trainer.optimizers if steps_in_backward else ()
        self._settle()
        self._snapshot = TrainingSnapshot(module, optimizers, trainer.strategy.root_device)
        return self

    def __exit__(self, *_: object) -> None:
        for parameter in self._loop.module.parameters():
            parameter.grad = None
        self._settle()
        self._snapshot.restore()
        self._stack.close()
        _SIGNS.clear()
        for callback in self._loop.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MemoryMonitor):
                callback.reset_peak()

    def _settle(self) -> None:
        """Divide what a pass has left gathered, so that the next one begins with the weights that are put back."""
        if self._loop.engine is not None:
            self._loop.engine.settle()

    def go_on_from(self, start: Pass) -> None:
        """Let all passes begin with what another one has written on the module, as the next step will."""
        self._start = start

    def _go_back(self) -> None:
        self._snapshot.restore()
        if self._start is not None:
            StepState.load(self._start.written)

    def whole(self, after: Pass | None = None, carried: Collection[str] = ()) -> Pass:
        """Run the samples together.

        Args:
            after: The pass before it, if it goes on with some of what that wrote on the module.
            carried: Names of what it goes on with.

        Raises:
            PartFailed: If they fail for another reason than memory, being fewer than the batch.
        """
        self._go_back()
        if after is not None:
            StepState.load(after.written, carried)
        return self._try(self._window, self.cut.count, self._noise, self._divisor)

    def part(
        self, index: int, after: Pass | None = None, carried: Collection[str] = (), continues_random: bool = False
    ) -> Pass:
        """Run a part.

        Args:
            index: Which.
            after: The pass before it, if it goes on with the states of metrics and with some of what that wrote.
            carried: Names of what it goes on with.
            continues_random: Whether Python's and NumPy's generators go on as well.

        Raises:
            PartFailed: If the part fails for another reason than memory, though the whole did not.
        """
        self._go_back()
        if after is not None:
            StepState.load(after.written, carried)
            self._metrics.load(after.metric_states)
            if continues_random:
                random.setstate(after.host_random[0])
                numpy.random.set_state(after.host_random[1])  # noqa: NPY002
        size = self.cut.sizes[index]
        noise = SlicedNoise(self._noise, self.cut.first * index, size, self.cut.count)
        # Divided and multiplied again: gradients that the loss's weight does not reach show.
        found = self._try(self.parts[index], size, noise, 2 * self._divisor)
        found.draws_otherwise = noise.is_other
        return found

    def change_again(self, names: Collection[str]) -> list[str]:
        """Weights in training to which a part writes something else when it is run again from what it left there."""
        parameters = dict(self._loop.module.named_parameters())
        self.part(0)
        left = [parameters[name].detach().clone() for name in names]
        self._run(self.parts[0], SlicedNoise(self._noise, 0, self.cut.first, self.cut.count), self._divisor, False)
        return [name for name, one in zip(names, left, strict=True) if not one.equal(parameters[name])]

    def _try(self, batch: Any, size: int, noise: RecordedNoise, divisor: float) -> Pass:
        try:
            return self._run(batch, noise, divisor)
        except Exception as error:
            if is_out_of_memory(error) or (self._is_whole and size == self.cut.count):
                raise
            raise PartFailed(
                f"`training_step` can't be run on {size} samples of the batch alone: {type(error).__name__}: {error}. "
                "Parts are as wide as the batch: a module that needs the longest of its samples, as packed sequences "
                "do, or whose samples lie elsewhere than in the first dimension (graphs, lists of parts), says how to "
                "cut a batch by `split_batch(batch, sizes)` on the LightningModule."
            ) from error

    def _run(self, batch: Any, noise: RecordedNoise, divisor: float, moves_weights: bool = True) -> Pass:
        loop, module = self._loop, self._loop.module
        for parameter in module.parameters():
            parameter.grad = None
        self._settle()
        if moves_weights:
            _move_weights(module)
        before = _readings(module)
        logs, sketches, host_random = StepLogs(), _Sketches(module), _host_random()
        try:
            with noise, logs.capture(loop.results):
                output = loop.forward(self._request, with_own_tensors(batch), divisor)
                if self._request.zero_grad is not None and loop.engine is None:
                    sketches.clear()  # of passes that the step itself runs
                loss, numbers = output.closure_loss, returned(output.extra)
                del output
                if loss is not None:
                    loop.backward(self._request, loss, announce=False)
        finally:
            sketches.remove()
            self.least_bits = min(self.least_bits, noise.least_bits)
        after, slots = _readings(module), find_slots(module)
        changed = [slots[n] for n in slots if n in after and not alike(before.get(n), after[n], 0.0)]
        return Pass(
            divisor * sketches.matrix(0.0 if loss is None else float(loss.detach())),
            before,
            after,
            logs.calls,
            numbers,
            metric_values(module),
            self._metrics.save(),
            written=copies_of(changed),
            host_random=_host_random(),
            draws_on_host=_differs(host_random, _host_random()),
        )


def _readings(module: nn.Module) -> dict[str, Any]:
    """Return readings of everything that a step may change, but for generators of random numbers."""
    found = {name: slot.read() for name, slot in find_slots(module).items()}
    return {name: reading_of(value) for name, value in found.items() if not is_random_source(value)} | {
        name: reading_of(sample) for name, sample in sampled_weights(module).items()
    }


def _move_weights(module: nn.Module) -> None:
    """Move every trained weight by about one per cent of its tensor's size, always in the same way."""
    with torch.no_grad(), _disable_current_modes():
        for parameter in module.parameters():
            data = held_weight(parameter).data
            if not parameter.requires_grad or not data.is_floating_point() or type(data) is not Tensor:
                continue
            values = data.view(-1) if data.is_contiguous() else data.flatten()[:0]
            scale = _MOVED * float(values.float().std()) if values.numel() > 1 else 0.0
            for chunk in values.split(_CHUNK):
                chunk.add_(_signs(chunk.device)[: len(chunk)], alpha=scale or _MOVED)


# --- projections of gradients ---------------------------------------------------------------------------------------


class _Sketches:
    """Random projections of the gradients of a backward pass.

    Args:
        module: The module; its gradients are read as they are made, for some techniques free them at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._rows: dict[int, Tensor] = {}
        self._handles = [p.register_hook(self._hook(index)) for index, p in enumerate(self._parameters)]

    def _hook(self, index: int) -> Any:
        def add(gradient: Tensor) -> None:
            found = _project(gradient)
            self._rows[index] = self._rows[index] + found if index in self._rows else found

        return add

    def clear(self) -> None:
        """Clear gradients and projections, as a step does between forward and backward."""
        self._rows.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def remove(self) -> None:
        """Read gradients no more."""
        for handle in self._handles:
            handle.remove()

    def matrix(self, loss: float) -> Tensor:
        """Return the projections, (parameters + 1, projections) in float64 on the CPU; the last row is the loss."""
        rows = []
        for index, parameter in enumerate(self._parameters):
            # What hooks left of it, unless it was freed at once, as some techniques do.
            found = self._rows.get(index) if parameter.grad is None else _project(parameter.grad)
            rows.append(torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64) if found is None else found.cpu().double())
        last = torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64)
        last[0] = loss
        return torch.stack([*rows, last])


def _project(gradient: Tensor) -> Tensor:
    """Return random projections of a gradient, in float64 where the device has it."""
    with torch.no_grad(), _disable_current_modes():
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        wide = torch.float32 if gradient.device.type == "mps" else torch.float64
        total = torch.zeros(_NUM_PROJECTIONS, dtype=wide, device=gradient.device)
        for index, chunk in enumerate(gradient.reshape(-1).split(_CHUNK)):
            signed = chunk.to(wide) * _signs(gradient.device)[: len(chunk)]
            padded = nn.functional.pad(signed, (0, -len(chunk) % _NUM_PROJECTIONS))
            total += (1 if index.bit_count() % 2 else -1) * padded.view(-1, _NUM_PROJECTIONS).sum(0)
        return total


_SIGNS: dict[torch.device, Tensor] = {}


def _signs(device: torch.device) -> Tensor:
    if device not in _SIGNS:
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
        _SIGNS[device] = values.to(device)
    return _SIGNS[device]


# --- surroundings of a pass -----------------------------------------------------------------------------------------


def _host_random() -> tuple[Any, Any]:
    return random.getstate(), numpy.random.get_state()  # noqa: NPY002


def _differs(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] != other[0] or one[1][2] != other[1][2] or not numpy.array_equal(one[1][1], other[1][1])


class SilentLogger(DummyLogger):
    """Writes nothing, and remembers the names that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @override
    def log_metrics(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self.names.update(metrics)


@contextmanager
def silenced(trainer: Trainer) -> Iterator[list["SilentLogger"]]:
    """Give the module loggers that write nothing, for steps that are not part of training."""
    before = trainer.loggers
    silent = [SilentLogger() for _ in before]
    trainer.loggers = silent  # type: ignore[assignment]
    try:
        yield silent
    finally:
        trainer.loggers = before


@contextmanager
def _without_autocast(trainer: Trainer) -> Iterator[None]:
    """Compute in the parameters' own precision: gradients of 16 bits differ by more than many a wrong weight."""
    attributes = vars(trainer.precision_plugin)
    attributes["forward_context"] = nullcontext
    try:
        yield
    finally:
        del attributes["forward_context"]


@contextmanager
def _exact_products() -> Iterator[None]:
    with exact_products(), torch.compiler.set_stance("force_eager"):
        yield
