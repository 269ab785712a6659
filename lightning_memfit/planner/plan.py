"""`Plan`: what was chosen, the memory and time predicted for it, why, and what was passed over. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from lightning_memfit.memory import MemoryBreakdown, Tier, format_bytes
from lightning_memfit.techniques.core.facts import arguments_of
from lightning_memfit.techniques.core.registry import techniques
from lightning_memfit.techniques.core.setting import Setting, TechniqueChoice

if TYPE_CHECKING:
    from lightning_memfit.planner.workload import Workload

FORMAT = 5


@dataclass(frozen=True)
class TechniqueEffect:
    """What one technique of the plan contributes."""

    technique: str
    saved_bytes: int
    """Bytes of the device saved against the plan without it; negative if it costs memory."""
    extra_seconds: float
    """Seconds added per optimizer step; negative if it saves time."""


@dataclass(frozen=True)
class Alternative:
    """A setting that was not chosen."""

    techniques: str
    reason: str


@dataclass(frozen=True)
class Row:
    """A setting that every plan is compared with: the recipe's own, the best with its numbers, or the fastest."""

    name: str
    label: str
    """The setting in a few words; empty if there is none."""
    fits: bool | None
    """None if that was not worked out."""
    needed_bytes: int | None
    """Bytes of a device; the least by a closed form if `basis` says so."""
    seconds_per_step: float | None
    per_s: float | None
    """Tokens per second over all devices; samples for batches without sequences."""
    changes: tuple[str, ...]
    """What differs from the recipe's precision and exact optimizer states, in words; empty if nothing does."""
    basis: str
    """Where the figures come from."""
    note: str = ""
    """Why it doesn't fit, or why too little is known."""


@dataclass(frozen=True)
class Plan:
    """The fastest setting that fits, or why none does."""

    model: str
    num_parameters: int
    batch_size: int
    """Samples per optimizer step, over all devices."""
    sequence_length: int | None
    device: str
    """Name of one device."""
    usable_bytes: int
    """Bytes of one device that the plan may use."""
    setting: Setting | None
    """None if nothing fits."""
    devices: int = 1
    """Number of devices available; the plan takes `setting.world_size` of them."""
    peak_bytes: int = 0
    """Peak bytes of live tensors (`torch.cuda.max_memory_allocated`)."""
    needed_bytes: int = 0
    """Bytes that the device must have, including fragmentation and the runtime context."""
    breakdown: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    """Bytes per device at the peak, by tier, including host memory and disk."""
    written_bytes: int = 0
    """Bytes that all devices of a machine write to disk in every optimizer step."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of an optimizer step by component."""
    uncorrected: Mapping[str, float] = field(default_factory=dict)
    """The same without corrections from earlier measurements on the device; used for calibration."""
    rates: str = ""
    """Name under which measured steps correct the device's rates."""
    bought: tuple[TechniqueEffect, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    optimizer: str = ""
    """Class names of the module's own optimizers."""
    changes: tuple[str, ...] = ()
    """What the plan changes in the recipe's numbers, in words; empty if it keeps them."""
    rows: tuple[Row, ...] = ()
    """What the plan is compared with; empty if that was not asked for."""
    advice: tuple[str, ...] = ()
    """What to change or buy if nothing fits."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is a setting that fits."""
        return self.setting is not None

    @property
    def headroom_bytes(self) -> int:
        """Bytes that stay free, not counting the safety margin."""
        return self.usable_bytes - self.needed_bytes

    @property
    def seconds_per_step(self) -> float:
        """Predicted time of an optimizer step."""
        return sum(self.seconds.values())

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second, over all devices; 0 if nothing fits."""
        return self.batch_size / self.seconds_per_step if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted tokens per second; None for batches without sequences."""
        return None if self.sequence_length is None else self.samples_per_s * self.sequence_length

    @property
    def written_per_day(self) -> int:
        """Bytes that a day of training writes to disk."""
        return round(self.written_bytes * 86400 / self.seconds_per_step) if self.written_bytes else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        own = {one.name: _plain(getattr(self, one.name)) for one in fields(self)}
        return own | {
            "format": FORMAT,
            "fits": self.fits,
            "setting": None if self.setting is None else self.setting.to_dict(),
            "label": "" if self.setting is None else label(self.setting),
            "summary": self.summary(),
            "headroom_bytes": self.headroom_bytes if self.fits else None,
            "breakdown": self.breakdown.to_dict(),
            "seconds_per_step": self.seconds_per_step,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "written_per_day": self.written_per_day,
            "numbers": self.numbers(),
        }

    def numbers(self) -> str:
        """Precision and optimizer, and what changes in the recipe's numbers, in one line; empty if nothing fits."""
        if self.setting is None:
            return ""
        choice = self.setting.of_kind("optimizer")
        optimizer = f"{self.optimizer or 'the own one'}{f' as {choice.name}' if choice is not None else ''}"
        changes = ", ".join(self.changes) or "nothing"
        return f"precision {self.setting.precision}, optimizer {optimizer}; changes in the numbers: {changes}"

    @property
    def why_unknown(self) -> str:
        """Why nothing could be worked out, where nothing is known to need too much, and what to do."""
        why = self.notes[0] if self.notes else "the memory of no combination is known."
        return f"{why} `MicroBatching()` finds the micro-batch by measured steps."

    def summary(self) -> str:
        """One sentence."""
        if self.setting is None:
            where = f"{self.devices} x {self.device}" if self.devices > 1 else self.device
            return f"Nothing fits {where}: {self.advice[0] if self.advice else self.why_unknown}"
        speed = f"{self.tokens_per_s:.0f} tokens/s" if self.tokens_per_s else f"{self.samples_per_s:.1f} samples/s"
        host = self.breakdown.total(Tier.HOST) + self.breakdown.total(Tier.PINNED_HOST)
        disk = self.breakdown.total(Tier.DISK)
        each = " per device" if self.setting.world_size > 1 else ""
        beside = "".join(
            f", {format_bytes(size)} of {where}{each}"
            for size, where in ((host, "host memory"), (disk, "disk"))
            if size
        )
        return (
            f"{label(self.setting)}: needs {format_bytes(self.needed_bytes)} of {format_bytes(self.usable_bytes)} "
            f"usable{beside}, about {speed}"
        )


def _plain(value: Any) -> Any:
    """Lists for tuples and dictionaries for dataclasses, whatever is in them."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value


def label(setting: Setting) -> str:
    """A setting in a few words."""
    names = [choice.name for choice in setting.chosen]
    on = f"{setting.world_size} devices, " if setting.world_size > 1 else ""
    if not any(choice.technique.kind == "precision" for choice in setting.chosen):
        names.insert(0, "32-true")
    if setting.micro_batch_size is None:
        return " + ".join(names) + (f", {on}".removesuffix(", ") if on else "")
    return f"{' + '.join(names)}, {on}micro-batch {setting.micro_batch_size} x {setting.accumulate_grad_batches}"


# A plan as YAML that is applied on top of its recipe: `fit --config recipe.yaml --config plan.yaml`.


_OWN = "lightning_memfit"
FEEDBACK = "lightning_memfit.PlanFeedback"
BATCHING = "lightning_memfit.MicroBatching"


def overlay_of(plan: Plan, workload: Workload, nvme_path: str | None = None) -> dict[str, Any]:
    """What the plan says, as recipe configuration.

    Its callbacks are appended to the recipe's; the command line takes out those that `is_planned` names.
    The loader makes the micro-batches if its size can be set; otherwise `MicroBatching` cuts them, as that of a recipe
    does, with its own arguments: then a mean over what a batch predicts stays one over the whole step. DeepSpeed's
    engines accumulate themselves.

    Args:
        plan: A plan that fits.
        workload: What it was made for.
        nvme_path: Folder for data offloaded to disk; by default the strategy reads it from the environment.

    Raises:
        ValueError: If the plan doesn't fit.
    """
    if plan.setting is None:
        raise ValueError("Nothing fits, so there is no plan to write.")
    setting = plan.setting
    laid = setting.without_sizes().overlay().get("trainer", {})
    chosen = laid.pop("callbacks+", [])
    alone = {"strategy": "auto", "devices": 1, "num_nodes": 1}  # overrides the recipe
    trainer: dict[str, Any] = {"precision": setting.precision, **alone, **laid}
    if setting.sharding is not None and setting.sharding.on_disk:
        trainer["strategy"]["init_args"] = {**trainer["strategy"]["init_args"], "nvme_path": nvme_path}
    size, loaded = setting.micro_batch_size or 1, workload.loaded_samples(setting)
    if workload.is_cut(setting):
        arguments = {**(workload.batching or {}), "micro_batch_size": size}
        chosen = [*chosen, {"class_path": BATCHING, "init_args": arguments}]
    trainer["accumulate_grad_batches"] = size * setting.accumulate_grad_batches // loaded
    told = {"seconds": dict(plan.uncorrected), "rates": plan.rates, "peak_bytes": plan.peak_bytes}
    trainer["callbacks+"] = [*chosen, {"class_path": FEEDBACK, "init_args": told}]
    data = {"data": {"init_args": {"batch_size": loaded}}} if workload.loader_batch is None else {}
    return {**data, "trainer": trainer}


def technique_classes() -> frozenset[str]:
    """Import paths of all callbacks that techniques put into a run."""
    return frozenset(spec.class_path for technique in techniques() for spec in technique.callbacks)


def own_adapter(callbacks: Sequence[Any], precision: str) -> TechniqueChoice | None:
    """The adapters that a run trains by its own callbacks; None if it trains none.

    Args:
        callbacks: Of its Trainer.
        precision: Lightning's name.

    Raises:
        ValueError: If no record describes them, so that a plan can't keep them.
    """
    paths = [f"{type(one).__module__}.{type(one).__name__}" for one in callbacks]
    found = _of_adapters(paths)
    own = [one for one, path in zip(callbacks, paths, strict=True) if path in found]
    if not found:
        return None
    try:
        adapter = Setting.from_callbacks(own, precision).of_kind("adapter")
        reason = "no adapters of its own are trained by that"
    except ValueError as error:
        adapter, reason = None, str(error)
    if adapter is not None:
        made = {spec.class_path: spec.arguments for spec in adapter.technique.configured(**adapter.options)[1]}
        # A choice stores lists in place of tuples.
        as_made = [TechniqueChoice(path, arguments) for path, arguments in sorted(made.items())]
        as_written = [TechniqueChoice(path, arguments_of(one)) for path, one in zip(found, own, strict=True)]
        if as_made != sorted(as_written, key=lambda one: one.name):
            adapter, reason = None, "plans give it other arguments"
    if adapter is None:
        raise ValueError(
            f"`trainer.callbacks` has {found[0].rpartition('.')[2]}, and no plan can keep it: {reason}. Choose the "
            "other techniques by hand, by what `memfit estimate` says."
        )
    return adapter


def _of_adapters(class_paths: Iterable[str]) -> list[str]:
    of_adapters = {spec.class_path for one in techniques() if one.kind == "adapter" for spec in one.callbacks}
    names = {path.rpartition(".")[2] for path in of_adapters}
    return [path for path in class_paths if is_technique(path) and path.rpartition(".")[2] in names]


def is_planned(class_path: str) -> bool:
    """Whether a callback, by its full path or as `lightning_memfit.NAME`, is one that a plan replaces by its own."""
    return is_technique(class_path) or class_path.rpartition(".")[2] == FEEDBACK.rpartition(".")[2]


def is_batching(class_path: str) -> bool:
    """Whether a callback, by its full path or as `lightning_memfit.NAME`, is `MicroBatching`."""
    return is_technique(class_path) and class_path.rpartition(".")[2] == BATCHING.rpartition(".")[2]


def is_technique(class_path: str) -> bool:
    """Whether a callback, by its full path or as `lightning_memfit.NAME`, is one that techniques put into a run."""
    package, _, name = class_path.rpartition(".")
    return package.split(".")[0] == _OWN and name in {path.rpartition(".")[2] for path in technique_classes()}
