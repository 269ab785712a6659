"""`Division`: how a strategy divides a run among ranks; `estimate_rank`: what one of them needs, by tier.

Torch's strategies (DDP, FSDP2, tensor parallelism) are traced themselves (`profile.ranks`): such a profile is that of
one rank already. A run under DeepSpeed is worked out from a trace of one device that holds everything (`zero_rank`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lightning_memfit.estimate.deepspeed import NCCL_BYTES, PERSISTENT_NUMEL, DeepSpeedRun, OffloadTarget
from lightning_memfit.estimate.deepspeed_sizes import AioSettings, infinity_sizes, most_per_module, zero_sizes
from lightning_memfit.estimate.estimate import Estimate, LargeTensor, estimate_step, predict_peak_bytes
from lightning_memfit.estimate.placement import ddp_rank
from lightning_memfit.estimate.steady_state import LASTING, SteadyState
from lightning_memfit.estimate.zero_rank import NotDividedError as NotDividedError
from lightning_memfit.estimate.zero_rank import moving_bytes, passes_of, state_bytes, zero_rank
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.memory.parameters import ParameterInfo, trained
from lightning_memfit.profile.record import ModelProfile

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from lightning_memfit.device.runtime import RuntimeMemory

_DEEPSPEED_SIZES = {"reduce_bucket_size": 5e8, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9}
"""DeepSpeed's own, which a strategy leaves that isn't ours (`deepspeed.runtime.zero.config`, 0.19.8)."""

MODELLED_AS: dict[str, Any] = {
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.use_multi_rank_bucket_allreduce": True,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.stage3_param_persistence_threshold": PERSISTENT_NUMEL,
    "zero_optimization.stage3_module_granularity_threshold": 0,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.cpu_offload": None,
    "zero_optimization.cpu_offload_param": None,
    "zero_optimization.zenflow": None,
    "data_types.grad_accum_dtype": None,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    "torch_autocast.enabled": False,
    "communication_data_type": None,
}
"""Options of DeepSpeed that change memory, with the values that are modelled: its defaults."""


@dataclass(frozen=True)
class Division:
    """What a strategy does with weights, gradients and optimizer states of a run on `ranks` devices."""

    name: str
    """As the user calls it."""
    stage: int
    """0 replicates (DDP), 1 divides optimizer states, 2 also gradients, 3 also weights."""
    ranks: int = 1
    ranks_per_machine: int = 1
    deepspeed: bool = False
    offload_optimizer: OffloadTarget = "none"
    offload_parameters: OffloadTarget = "none"
    pin_memory: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the `zero_optimization` section that the user has set; our strategies choose the others."""
    params_in_host: int = 0
    """With parameters on disk: elements that stay in host memory."""
    copies_gradients: bool = False
    """With DDP: whether its buckets are a copy of the gradients, instead of what the gradients are views of."""
    in_closed_form: bool = False
    """With DDP: a rank is worked out from a trace of one device, as in a process of the run's group none is traced."""

    def to_dict(self) -> dict[str, Any]:
        """Plain figures, ready for JSON."""
        names = ("name", "stage", "ranks", "ranks_per_machine", "offload_optimizer", "offload_parameters", "traced")
        return {name: getattr(self, name) for name in names}

    @property
    def traced(self) -> bool:
        """Whether the strategy is traced itself, so that a profile is that of one rank (`profile.ranks`)."""
        return not self.deepspeed and not self.in_closed_form

    @property
    def offloads(self) -> bool:
        """Whether anything is kept off the device."""
        return self.offload_optimizer != "none" or self.offload_parameters != "none"

    def traced_precision(self, precision: str) -> str:
        """The precision to trace: DeepSpeed computes in its own half-precision weights, whatever Lightning calls it."""
        return "bf16-true" if self.deepspeed and "16" in precision else precision

    def run_of(
        self, parameters: Sequence[ParameterInfo], itemsize: int, calls_itself: bool = True, **options: Any
    ) -> DeepSpeedRun:
        """A run under DeepSpeed, with the buffer sizes that our strategies set where the user sets none."""
        distinct, sizes = [p for p in parameters if not p.shared_with], None
        zero = zero_sizes({**self.sizes, "stage": self.stage}, [p.numel for p in distinct], self.ranks)
        if "nvme" in (self.offload_optimizer, self.offload_parameters):
            large = AioSettings().min_swapped_bytes // itemsize * self.ranks
            sizes = infinity_sizes(
                [[p.numel for p in distinct if p.trainable]],
                self.ranks,
                itemsize,
                params_per_module=most_per_module(parameters, large),
                max_in_cpu=self.params_in_host,
            )
        # A step that calls its module shows DeepSpeed no whole pass in one order: nothing is gathered ahead.
        ahead = self.stage == 3 and not calls_itself and self.offload_parameters != "nvme"
        return DeepSpeedRun(
            parameters,
            self.stage,
            self.ranks,
            itemsize,
            bucket_size=zero["reduce_bucket_size"],
            sub_group_size=zero.get("sub_group_size", 0),
            sizes=sizes,
            live=zero["stage3_max_live_parameters"] if ahead else 0,
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
            pin_memory=self.pin_memory,
            **options,
        )


def division_of(strategy: Strategy, name: str, ranks: int, ranks_per_machine: int) -> Division | None:
    """How a Lightning strategy divides a run; None if one device holds everything.

    Raises:
        NotDividedError: If that isn't known.
    """
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )

    if isinstance(strategy, DeepSpeedStrategy):
        return _of_deepspeed(strategy, name, ranks, ranks_per_machine)
    if isinstance(strategy, DDPStrategy):
        copies = not strategy._ddp_kwargs.get("gradient_as_bucket_view", False)
        return Division(name, 0, ranks, ranks_per_machine, copies_gradients=copies)
    if isinstance(strategy, ModelParallelStrategy):
        return Division(name, 3, ranks, ranks_per_machine)
    if isinstance(strategy, SingleDeviceStrategy):
        return None
    raise NotDividedError("it is unknown what it keeps on each device")


def division_in_plans(strategy: Strategy, name: str, ranks: int, ranks_per_machine: int) -> Division | None:
    """As `division_of`, for a strategy that plans know; they work out a rank of a sharded run in closed form.

    Raises:
        NotDividedError: If plans don't know it.
    """
    from lightning.pytorch.strategies import ModelParallelStrategy

    if getattr(strategy, "sequence_parallel_size", 1) > 1:
        raise NotDividedError("plans know no `sequence_parallel_size`")
    division = division_of(strategy, name, ranks, ranks_per_machine)
    # `ModelParallelStrategy` leaves it to the module what is sharded; `FullyShardedStrategy` has these arguments.
    if isinstance(strategy, ModelParallelStrategy) and (
        getattr(strategy, "tensor_parallel_size", None) != 1
        or getattr(strategy, "sharding_size", None) not in (None, ranks)
        or getattr(strategy, "reshard_after_forward", None) is not True
        or getattr(strategy, "blocks", None) is not None
        or getattr(strategy, "gather_dtype", None) is not None
    ):
        raise NotDividedError("plans are for `memfit_fsdp2` with its own arguments, which shards over all ranks")
    return division


def _of_deepspeed(strategy: Any, name: str, ranks: int, ranks_per_machine: int) -> Division:
    zero = strategy.config.get("zero_optimization") or {}
    if zero.get("stage") not in (1, 2, 3):
        raise NotDividedError(f"DeepSpeed's stage {zero.get('stage', 0)} is not modelled")
    places: dict[str, OffloadTarget] = {
        section: zero.get(section, {}).get("device", "none") for section in ("offload_optimizer", "offload_param")
    }
    sections = [zero[section] for section in places if section in zero]
    to_disk = bool(getattr(strategy, "nvme_path", None))  # `ZeroInfinityStrategy` writes its sections when it starts
    if "nvme" in places.values() and not to_disk:
        raise NotDividedError("buffers for disk are modelled for `memfit_zero_infinity` only")
    if any(section.get("ratio", 1.0) != 1.0 for section in sections):
        raise NotDividedError("`ratio` of an offloaded optimizer is not modelled")
    for path, modelled in MODELLED_AS.items():
        section, _, key = path.rpartition(".")
        value = ((strategy.config.get(section) or {}) if section else strategy.config).get(key, modelled)
        if value != modelled:
            raise NotDividedError(f"`{path}={value}` of DeepSpeed is not modelled")
    defaults = {} if getattr(strategy, "chooses_sizes", False) else _DEEPSPEED_SIZES
    sizes = {key: zero.get(key, defaults.get(key)) for key in _DEEPSPEED_SIZES}
    targets: list[OffloadTarget] = ["nvme" if to_disk and place != "none" else place for place in places.values()]
    return Division(
        name,
        zero["stage"],
        ranks,
        ranks_per_machine,
        deepspeed=True,
        offload_optimizer=targets[0],
        offload_parameters=targets[1],
        pin_memory=any(bool(section.get("pin_memory")) for section in sections) and not to_disk,
        sizes={key: int(size) for key, size in sizes.items() if isinstance(size, (int, float))},
        params_in_host=int(getattr(strategy, "params_in_host", 0)),
    )


# --- one rank ---------------------------------------------------------------------------------------------------------


def estimate_rank(
    profile: ModelProfile,
    division: Division | None,
    micro_batch_size: int | None = None,
    runtime: RuntimeMemory | None = None,
    num_largest: int = 5,
) -> Estimate:
    """Predict the peak of a rank's training step.

    Raises:
        ValueError: If the profile doesn't know that micro-batch size.
        NotDividedError: If the profile shows no second optimizer step, from which on memory is the same in each, or
            states that DeepSpeed can't divide.
    """
    whole = estimate_step(profile, micro_batch_size, runtime, num_largest)
    if division is None:
        return whole
    if division.traced:
        more, total = _buffer_bytes(profile, division), whole.total_bytes
        buffers = MemoryBreakdown.device({Category.COMMUNICATION: more})
        return replace(whole, breakdown=whole.breakdown + buffers, total_bytes=total + more)
    at = _at(profile, micro_batch_size)
    by_phase, phase, breakdown = _on_rank(at, division)
    workspace = runtime.allocated_bytes if runtime is not None else 0
    context = runtime.context_bytes if runtime is not None else 0
    fragmentation = whole.reserved_bytes - whole.allocated_bytes + whole.spare_bytes
    outside = breakdown.get(Category.FRAGMENTATION) + breakdown.get(Category.RUNTIME_CONTEXT)  # not tensors
    tensors = breakdown.total() - outside + workspace
    around = {
        Category.TEMPORARY: workspace,
        Category.FRAGMENTATION: fragmentation,
        Category.RUNTIME_CONTEXT: context,
    }
    reserved = tensors + fragmentation
    return replace(
        whole,
        breakdown=breakdown + MemoryBreakdown.device(around) + MemoryBreakdown.from_dict(profile.host),
        phase=phase,
        allocated_bytes=tensors + whole.spare_bytes,
        reserved_bytes=reserved,
        total_bytes=reserved + context + outside,
        workspace_bytes=workspace,
        by_phase={name: size + workspace + whole.spare_bytes for name, size in by_phase.items()},
        largest=_largest(at, num_largest),
        timeline=None,
    )


def predict_rank_bytes(
    profile: ModelProfile, division: Division, micro_batch_size: int, runtime: RuntimeMemory | None = None
) -> int:
    """Memory that a rank's device must have, without fragmentation, for searches over micro-batch sizes."""
    if division.traced:
        context = runtime.context_bytes if runtime is not None else 0
        return predict_peak_bytes(profile, micro_batch_size, runtime) + context + _buffer_bytes(profile, division)
    _, _, breakdown = _on_rank(_at(profile, micro_batch_size), division)
    return breakdown.total() + (runtime.allocated_bytes + runtime.context_bytes if runtime is not None else 0)


def _buffer_bytes(profile: ModelProfile, division: Division) -> int:
    """Memory of the communicators that is no tensor."""
    return NCCL_BYTES if profile.device_kind.has_own_memory and division.ranks > 1 else 0


def _at(profile: ModelProfile, micro_batch_size: int | None) -> ModelProfile:
    size = micro_batch_size or profile.micro_batch_size
    return replace(profile, events=profile.events_at(size), micro_batch_size=size, slopes=None, larger=None)


def _largest(profile: ModelProfile, count: int) -> tuple[LargeTensor, ...]:
    """The largest tensors of forward and backward that are no weights, gradients or states, which are divided."""
    moving = moving_bytes(profile)
    peak = max((first + int(moving[first:stop].argmax()) for _, first, stop in passes_of(profile)), key=moving.item)
    found = profile.events.largest_at(peak, len(profile.events.sizes))
    kept = [LargeTensor(*item) for item in found if item[1] not in LASTING]
    return tuple(kept[:count])


def traced_run(profile: ModelProfile, division: Division, activation_bytes: int = 0) -> DeepSpeedRun:
    """A traced run as DeepSpeed makes it.

    Raises:
        NotDividedError: If the optimizer's states can't be divided.
        ValueError: If the trace shows no second step like the first.
    """
    on_cpu, plain = profile.device_kind.is_host, SteadyState.of(profile, 1)
    stepped = sum(p.numel * p.itemsize for p in trained(profile.parameters))
    # Strategies choose the fused kernel for a step on the CPU.
    scratch = 0 if on_cpu else min(4.0, 4.0 * (plain.step_bytes - plain.kept_bytes) / max(1, stepped))
    return division.run_of(
        profile.parameters,
        2 if "16" in profile.precision else 4,
        profile.calls_itself,
        state_bytes=state_bytes(profile),
        scratch_bytes=round(scratch),
        accumulates=profile.accumulate_grad_batches > 1,
        on_cpu=on_cpu,
        buffer_bytes=plain.buffer_bytes,
        activation_bytes=activation_bytes,
        is_fp16=profile.precision.startswith("16"),
    )


def _on_rank(profile: ModelProfile, division: Division) -> tuple[dict[str, int], str, MemoryBreakdown]:
    """Bytes of tensors by moment, the moment of the peak, and what there is then."""
    try:
        if division.deepspeed:
            return zero_rank(profile, traced_run(profile, division))
        return ddp_rank(profile, division.ranks, division.copies_gradients)
    except NotDividedError:
        raise
    except (IndexError, KeyError, ValueError) as error:
        raise NotDividedError("the trace shows no second step like the first") from error
