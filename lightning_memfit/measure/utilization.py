"""`FlopsMonitor`: FLOP/s of a run's model, and their share of the device's peak (MFU)."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_memfit.device.catalogue import find_device
from lightning_memfit.measure.throughput import Throughput, count_samples, count_tokens
from lightning_memfit.memory.float32_products import precision_on_cuda
from lightning_memfit.memory.flops import FORMULAS
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.wrapping import wrap_method

_FORWARD_AND_BACKWARD = 3  # the backward multiplies by the weights and by the inputs, which is twice the forward


class _NoModules(nullcontext[None]):
    """Stands in for a tracker of modules, with one name for all of them."""

    parents = frozenset({"Global"})


class _ForwardFlops(FlopCounterMode):
    """Counts the forward alone: under manual optimization a training step also runs backward."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=FORMULAS)
        self.mod_tracker: Any = _NoModules()  # torch's sets hooks that fail in `torch.autograd.grad`

    @override
    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # in backward, and what it recomputes
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]


class FlopsMonitor(Callback):
    """Log `throughput/model_tflops_per_second` and `throughput/mfu`, the model FLOPs utilization of a device.

    Model FLOPs are three times those of the forward (Chowdhery et al. 2022, appendix B): recomputing activations costs
    time but does not count. The first forward, of a batch or a micro-batch, is counted operator by operator; after that
    a batch counts by its tokens (`input_ids`), or by its samples. Time is measured from the second optimizer step on;
    it includes waiting for data and leaves out validation. Figures are those of one device.

    Args:
        peak_flops: Peak rate of the device in FLOP/s. None takes the catalogue's dense rate of the CUDA device in the
            Trainer's precision; where that is unknown, and on the CPU, there is no MFU, and a message says so.

    Attributes:
        flops_per_second: Model FLOP/s over the run so far; None before the third optimizer step.
        mfu: Share of the peak that this is; None if the peak is unknown.

    Raises:
        ValueError: If `peak_flops` is not positive.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"`peak_flops={peak_flops}` must be positive, for example 989.4e12 for an H100 in bf16.")
        self.peak_flops = peak_flops
        self._peak = peak_flops
        self._unwrap: Callable[[], None] | None = None
        self._reset(torch.device("cpu"))

    def _reset(self, device: torch.device) -> None:
        self._throughput = Throughput(device)
        self._forward: int | None = None
        self._counted_over: tuple[int | None, int | None] = (None, None)
        self._flops_per_token: float | None = None
        self._flops_per_sample: float | None = None
        self._num_steps = self._global_step = 0

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOP/s of one device."""
        tokens, samples = self._throughput.tokens_per_second, self._throughput.samples_per_second
        if tokens is not None and self._flops_per_token is not None:
            return tokens * self._flops_per_token
        if samples is not None and self._flops_per_sample is not None:
            return samples * self._flops_per_sample
        return None

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s as a share of the device's peak."""
        achieved = self.flops_per_second
        return None if achieved is None or self._peak is None else achieved / self._peak

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare to count the first forward."""
        self._reset(trainer.strategy.root_device)
        self._global_step = trainer.global_step
        self._peak = self.peak_flops or _peak_of(trainer)
        self._restore()
        self._unwrap = wrap_method(trainer.strategy, "training_step", self._counted)

    def _counted(self, training_step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._forward is not None:
            return training_step(*arguments, **named)
        with _ForwardFlops() as counter:
            output = training_step(*arguments, **named)
        self._forward = counter.get_total_flops()
        part = next(iter((*arguments, *named.values())), None)  # of the batch, where it is run in micro-batches
        self._counted_over = count_samples(part), count_tokens(part)
        return output

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; log every `log_every_n_steps` optimizer steps of the Trainer."""
        if self._forward is not None and self._flops_per_sample is None:
            self._learn(trainer, batch)
        step = trainer.global_step
        stepped = step != self._global_step
        self._throughput.add(batch, stepped)
        if not stepped:
            return
        self._global_step = step
        self._num_steps += 1
        if self._num_steps == 1:
            self._throughput.start()
        every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if self._num_steps > 1 and self._num_steps % every == 0:
            self._log(trainer, pl_module)

    def _learn(self, trainer: Trainer, batch: Any) -> None:
        """Derive the cost of a token and of a sample from the first batch, and give the strategy its method back."""
        assert self._forward is not None
        samples, tokens = self._counted_over
        if samples is None:  # the step fetches its batches itself
            samples, tokens = count_samples(batch), count_tokens(batch)
        self._flops_per_sample = _FORWARD_AND_BACKWARD * self._forward / samples if samples else 0.0
        self._flops_per_token = _FORWARD_AND_BACKWARD * self._forward / tokens if tokens else None
        self._restore()

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._throughput.synchronize()
        if trainer.barebones or not (achieved := self.flops_per_second):
            return
        figures = {"throughput/model_tflops_per_second": achieved / 1e12}
        if self.mfu is not None:
            figures["throughput/mfu"] = self.mfu
        pl_module.log_dict(figures)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._throughput.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock run again."""
        self._throughput.resume()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the last figures; give the strategy its method back."""
        self._throughput.stop()
        self._restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the strategy its method back."""
        self._restore()

    def _restore(self) -> None:
        """Give the strategy its method back."""
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None


def _peak_of(trainer: Trainer) -> float | None:
    """Dense FLOP/s of the CUDA device in the Trainer's precision, from the catalogue."""
    device = trainer.strategy.root_device
    if not DeviceKind.of(device).is_catalogued:
        rank_zero_info(f"FlopsMonitor: no peak is known for `{device.type}`, so there is no MFU. Give `peak_flops`.")
        return None
    try:
        return find_device(torch.cuda.get_device_name(device)).flops_for(_dtype_of(str(trainer.precision)))
    except ValueError as error:
        rank_zero_info(f"FlopsMonitor: there is no MFU. {error} Give `peak_flops`.")
        return None


def _dtype_of(precision: str) -> str:
    if precision.startswith("bf16"):
        return "bfloat16"
    if precision.startswith("16"):
        return "float16"
    return "tf32" if precision_on_cuda() == "tf32" else "float32"
