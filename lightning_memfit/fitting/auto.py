"""`MemFit`: one callback that plans a run, and trains by the plan.

`target_of` and `precision_plugin` translate between a Trainer and the planner's terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memfit.device.host import probe_host
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.division import Division, NotDividedError, division_in_plans
from lightning_memfit.estimate.target import Target, device_target, host_target
from lightning_memfit.fitting.size.prediction import step_options
from lightning_memfit.fitting.step.callback import MicroBatching, check_strategy, own_method, refuse_batch_size_finder
from lightning_memfit.memory import parse_bytes
from lightning_memfit.memory.kind import DeviceKind, index_of
from lightning_memfit.planner.feedback import PlanFeedback
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.plan import Plan, technique_classes
from lightning_memfit.planner.rates import calibrated, rates_of
from lightning_memfit.planner.workload import (
    DEFAULT_ALLOW,
    Devices,
    Limits,
    Preference,
    Workload,
    check_allow,
    facts_of,
    tolerance_of,
)
from lightning_memfit.profile.build import batch_size
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.process import Elsewhere
from lightning_memfit.profile.trace import TraceError, somewhere
from lightning_memfit.reliability.consensus import PeerFailed, RankConsensus
from lightning_memfit.techniques.core import precision as of_techniques
from lightning_memfit.techniques.core.first_batch import first_batch
from lightning_memfit.techniques.core.model_facts import read_facts
from lightning_memfit.techniques.core.registry import strategy_of
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.micro_batching import TECHNIQUE as MICRO_BATCHING

T = TypeVar("T")


class MemFit(pl.Callback):
    """Plan a run for the device it is on, then train by the plan.

    The planner chooses precision, optimizer, loss, checkpointing and micro-batch. Effective batch, learning rate and
    schedule do not change. The first batches show whether the plan holds: out-of-memory errors lower the micro-batch,
    then recompute more blocks (`MicroBatching`); the first steps are measured for later plans (`PlanFeedback`).

    On several devices, by whatever they were started, the first rank plans and the others receive the plan, for the
    device with the least memory. The Trainer's strategy stays: DDP, `memfit_fsdp2` over all ranks, or DeepSpeed's as
    `ZeroStrategy` and `ZeroInfinityStrategy` run it.

    A run that can't be planned says why: its step can't be traced, its batch can't be read before the run, or the
    module cuts batches itself (`split_batch`, `num_samples`). Then precision, optimizer and checkpointing stay as they
    are, and `MicroBatching` finds the micro-batch by measured steps.

    It works on any Trainer and module; list it before callbacks that measure.

    Args:
        allow: Numerics that may change; `memfit plan --help` lists them. By default they change only if nothing else
            fits; those that are named also where that is faster.
        host_memory: RAM that the plan's offloading may use, such as `16GiB`; by default all that is free.
        prefer: `numbers` keeps the Trainer's precision and the module's own optimizer states wherever a plan with them
            fits; `speed` changes what is allowed where that gains over 5 %. By default `speed` if `allow` is given.

    Attributes:
        plan: The plan in use; None before `fit`, and where the run can't be planned.

    Raises:
        ValueError: If an argument makes no sense.
    """

    def __init__(
        self,
        allow: Sequence[str] | None = None,
        host_memory: str | int | None = None,
        prefer: Preference | None = None,
    ) -> None:
        self.allow = DEFAULT_ALLOW if allow is None else check_allow(allow)
        self.host_bytes = None if host_memory is None else parse_bytes(host_memory, "host_memory")
        self.tolerance = tolerance_of(prefer, allow)
        self.plan: Plan | None = None
        self._undo: Callable[[], None] | None = None

    # --- Lightning's hooks ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Plan, and insert the plan's callbacks after this one, where Lightning sets them up next."""
        self._take_off()
        if stage != "fit":
            return
        division = self._check(trainer)
        ranks = RankConsensus(trainer.world_size)
        try:
            target = _smallest(trainer, target_of(trainer), ranks)
            planned = _on_first_rank(trainer, lambda: self._planned(trainer, pl_module, target, division), ranks)
        finally:
            ranks.close()
        if isinstance(planned, Exception):
            self.plan = None
            self._put_on_measured(trainer, planned)
            return
        self.plan, loader_batch = plan, _ = planned
        rank_zero_info(f"MemFit: {plan.summary()}")
        rank_zero_info(f"MemFit: {plan.numbers()}")
        self._put_on(trainer, plan, loader_batch)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the Trainer as it was."""
        self._take_off()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the Trainer as it was; Lightning calls no `teardown` after an exception."""
        self._take_off()

    # --- planning ---------------------------------------------------------------------------------------------------

    def _planned(
        self, trainer: pl.Trainer, module: pl.LightningModule, target: Target, division: Division | None
    ) -> tuple[Plan, int] | Exception:
        """A plan, and the samples of a batch of the loader; or why there can be none."""
        name = type(module).__name__
        for hook in ("split_batch", "num_samples"):
            if own_method(module, hook) is not None:
                return ValueError(f"`{name}.{hook}` says what a batch is, and plans can't ask it for other sizes")
        try:
            batch = first_batch(trainer)
        except ValueError as error:
            return ValueError(f"a plan needs a batch, but {error}")
        try:
            with somewhere(name, module, batch, *_fixed_techniques(trainer)) as elsewhere:
                workload = self._workload(trainer, batch, target, division, elsewhere)
                plan = elsewhere.run(partial(make_plan, workload, ProfileCache()))
        except (TraceError, ValueError) as error:
            return error
        if plan.setting is None:
            said = " ".join(plan.advice) or plan.why_unknown
            raise MisconfigurationException(f"`MemFit`: Nothing fits {plan.device}: {said}")
        return plan, batch_size(batch)

    def _check(self, trainer: pl.Trainer) -> Division | None:
        """Refuse what no plan can be made for; return how the strategy divides the run, if it isn't on one device."""
        division = _division(trainer)
        if division is not None:
            check_strategy(trainer.strategy, trainer.accumulate_grad_batches, MicroBatching(last_resort="none").options)
        if not trainer.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                "`MemFit`: with manual optimization the module runs its own forward and backward, which no plan can "
                "cut. Use automatic optimization, or choose techniques yourself."
            )
        refuse_batch_size_finder(trainer)
        taken = technique_classes()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            kind = type(callback)
            if f"{kind.__module__}.{kind.__name__}" in taken:
                raise MisconfigurationException(
                    f"`MemFit` chooses techniques itself, and the Trainer has {kind.__name__} already. Leave one of "
                    "the two out."
                )
        return division

    def _workload(
        self, trainer: pl.Trainer, batch: Any, target: Target, division: Division | None, elsewhere: Elsewhere
    ) -> Workload:
        options = step_options(trainer)
        host = self.host_bytes if self.host_bytes is not None else probe_host().available_bytes
        return Workload(
            module=trainer.lightning_module,
            batch=batch,
            options=options,
            samples_per_step=batch_size(batch) * trainer.accumulate_grad_batches * trainer.world_size,
            target=target,
            rates=calibrated(rates_of(target)),
            facts=elsewhere.run(partial(facts_of, trainer.lightning_module, target, options)),
            limits=Limits(host_bytes=host if target.device_kind.has_own_memory else None),
            allow=self.allow,
            fixed=_fixed_techniques(trainer),
            loader_batch=batch_size(batch),
            own_micro_batch=batch_size(batch),
            devices=Devices(trainer.num_devices, trainer.num_nodes),
            division=division,
            tolerance=self.tolerance,
        )

    # --- applying ---------------------------------------------------------------------------------------------------

    def _put_on(self, trainer: pl.Trainer, plan: Plan, loader_batch: int) -> None:
        setting = plan.setting
        assert setting is not None
        added, plugins = of_techniques.split_precision(Setting(chosen=setting.chosen).callbacks())
        whole = setting.micro_batch_size == loader_batch
        run = Setting(chosen=setting.chosen).run(read_facts(trainer.lightning_module))
        if not whole or MICRO_BATCHING.unsupported(run, {}) is None:  # it also recovers, where it can
            size = setting.micro_batch_size or loader_batch
            added.append(MicroBatching(micro_batch_size=size, last_resort=_last_resort(trainer)))
        added.append(PlanFeedback(dict(plan.uncorrected), plan.rates, plan.peak_bytes))
        remove = self._insert(trainer, added)
        strategy, before = trainer.strategy, trainer.strategy.precision_plugin
        if plugins or setting.precision != trainer.precision or isinstance(before, of_techniques.TechniquePrecision):
            strategy.precision_plugin = plugins[0] if plugins else precision_plugin(setting.precision, strategy)

        def undo() -> None:
            remove()
            strategy.precision_plugin = before

        self._undo = undo

    def _put_on_measured(self, trainer: pl.Trainer, error: Exception) -> None:
        """Let `MicroBatching` find the micro-batch of a run that can't be planned."""
        refused = MICRO_BATCHING.unsupported(Setting().run(read_facts(trainer.lightning_module)), {})
        if refused is not None:
            raise MisconfigurationException(
                f"`MemFit` can neither plan this run ({error}) nor find its micro-batch by measured steps: {refused}"
            )
        rank_zero_warn(
            f"MemFit: this run can't be planned: {str(error).rstrip('.')}. Precision, optimizer and checkpointing stay "
            "as they are, and the micro-batch is found by measured steps."
        )
        measured = MicroBatching(last_resort=_last_resort(trainer))
        measured.may_trace = getattr(error, "cause", "") != "process"
        self._undo = self._insert(trainer, [measured])

    def _insert(self, trainer: pl.Trainer, added: list[pl.Callback]) -> Callable[[], None]:
        """Add callbacks after this one, where Lightning sets them up next; return what removes them."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        place = callbacks.index(self) + 1
        callbacks[place:place] = added

        def undo() -> None:
            # A new list: Lightning may be iterating over the old one, whose callbacks must still get their last hooks.
            trainer.callbacks = [callback for callback in callbacks if callback not in added]  # type: ignore[attr-defined]

        return undo

    def _take_off(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def _last_resort(trainer: pl.Trainer) -> Literal["none", "recompute"]:
    return "none" if isinstance(trainer.strategy, DeepSpeedStrategy) else "recompute"  # DeepSpeed repeats no step


def _fixed_techniques(trainer: pl.Trainer) -> tuple[Any, ...]:
    """The Trainer's techniques that plans know nothing of, and leave as they are."""
    given, known = of_techniques.techniques_of(trainer), technique_classes()
    return tuple(one for one in given if f"{type(one).__module__}.{type(one).__name__}" not in known)


# --- several ranks ----------------------------------------------------------------------------------------------------


def _division(trainer: pl.Trainer) -> Division | None:
    """How a Trainer's strategy divides a run; None on one device that holds everything.

    Raises:
        MisconfigurationException: If plans can't be made under it.
    """
    strategy, name = trainer.strategy, type(trainer.strategy).__name__
    try:
        division = division_in_plans(strategy, name, trainer.world_size, trainer.num_devices)
        if division is not None and strategy_of(division) is None:
            raise NotDividedError("plans know no strategy that divides and offloads the same")
    except NotDividedError as error:
        raise MisconfigurationException(
            f"`MemFit` can't plan under {name}: {error}. Use `memfit_ddp`, `memfit_fsdp2` or `memfit_zero_1`, `_2`, "
            "`_3`, or choose techniques yourself; see docs/guides/multi_gpu.md."
        ) from error
    return division


def _smallest(trainer: pl.Trainer, target: Target, ranks: RankConsensus) -> Target:
    """The device of the rank that has the least memory, as a target of all of them."""
    if trainer.world_size == 1 or target.usable_bytes is None:
        return target
    if target.device_kind.is_host and not target.counts_tensors:  # which the ranks of a machine share
        share = {name: getattr(target, name) // trainer.num_devices for name in ("capacity_bytes", "margin_bytes")}
        target = replace(target, **share)
    assert target.capacity_bytes is not None
    least = min(numbers[0] for numbers in ranks.exchange(target.capacity_bytes - target.margin_bytes))
    return replace(target, capacity_bytes=target.margin_bytes + round(least))


def _on_first_rank(trainer: pl.Trainer, work: Callable[[], T], ranks: RankConsensus) -> T:
    """Return on all ranks what a function returns on the first, which alone runs it.

    Raises:
        PeerFailed: On the other ranks, if the first one's function failed; there its own error is raised.
    """
    found: T | None = None
    failed: Exception | None = None
    if trainer.is_global_zero:
        try:
            found = work()
        except Exception as error:
            failed = error
    said = None if failed is None else f"{type(failed).__name__}: {failed}"
    found, said = ranks.from_rank(0, (found, said))
    if failed is not None:
        raise failed
    if said is not None:
        raise PeerFailed(f"rank 0 can't plan this run, so that no rank trains: {said}")
    return found  # type: ignore[return-value]


def target_of(trainer: pl.Trainer) -> Target:
    """Return a Trainer's device as a target, with the capacity that its `MemoryLimit` leaves.

    Raises:
        MisconfigurationException: If it is neither CUDA nor the CPU.
    """
    device = trainer.strategy.root_device
    limits = [c.limit_bytes for c in trainer.callbacks if isinstance(c, MemoryLimit)]  # type: ignore[attr-defined]
    kind = DeviceKind.of(device)
    if kind.is_host:
        return host_target(min(limits) if limits else None)
    if not kind.is_modelled:
        raise MisconfigurationException(f"`MemFit` plans for CUDA and for the CPU, not for `{device.type}`.")
    return device_target(index_of(device), limits)


def precision_plugin(name: str, strategy: Strategy) -> Precision:
    """Return Lightning's plugin for a precision under a strategy."""
    if isinstance(strategy, DeepSpeedStrategy):
        return DeepSpeedPrecision(name)  # type: ignore[arg-type]
    if name.endswith("-mixed"):
        return MixedPrecision(name, strategy.root_device.type)  # type: ignore[arg-type]
    return Precision() if name == "32-true" else HalfPrecision(name)  # type: ignore[arg-type]
