"""`ModelProfile`: everything known about a training step, as plain data. Reading one needs numpy, not torch."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.kind import CUDA, DeviceKind
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.profile.events import EventList, Floats, at_size, is_scratch, with_kept
from lightning_memfit.profile.work import OperatorWork, PhaseWork


@dataclass(frozen=True)
class Growth:
    """Memory that the run keeps for later, more of it with every batch."""

    bytes_per_batch: int
    batches: int
    """Batches after which the figures hold."""
    site: str = ""
    """Where most of it is made: `module path | operator`."""


@dataclass(frozen=True)
class LargerSizes:
    """A step with two samples, from which every larger size follows, where a batch of one has another memory layout."""

    events: EventList
    micro_batch_size: int
    slopes: Floats


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """What optimizer steps allocated and computed, at the size of their batch."""

    events: EventList
    parameters: tuple[ParameterInfo, ...] = ()
    num_blocks: int = 0
    traced_blocks: int = 0
    block_class: str = ""
    calls_itself: bool = True
    """Whether the training step calls the root module, as `self(...)` does; True where that isn't known."""
    optimizer: str = ""
    """Class names of the optimizers."""
    optimizer_groups: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Package and class, as `torch.AdamW`, and hyper-parameters of their parameter groups, equal ones once."""
    flops: dict[str, int] = field(default_factory=dict)
    """FLOPs of one micro-batch by phase, of the whole module."""
    block_flops: dict[str, int] = field(default_factory=dict)
    """FLOPs by phase of one repeated block."""
    work: PhaseWork = field(default_factory=dict)
    """Operators by phase of the same micro-batch that compute something, views left out."""
    attention_kernels: dict[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    """Values the trace had to assume, in words; empty if the figures rest on the real batch alone."""
    traced_batches: int = 0
    """Batches that were traced or measured."""
    growth: Growth | None = None
    """Memory that grew to the end; None where two steps in a row allocated alike and kept nothing."""
    remarks: tuple[str, ...] = ()
    """What the figures don't cover, or are the largest of, one clause each."""
    host: dict[str, dict[str, int]] = field(default_factory=dict)
    """Host memory that the run keeps, by tier and category, as `MemoryBreakdown.to_dict` gives it."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile(RecordedStep):
    """One traced training step of a module, for any micro-batch size.

    `events` holds the sizes at `micro_batch_size`, as `flops` and `work` do; `slopes` what every storage grows by with
    more samples (`events.at_size`), where traces at several sizes agreed in structure.
    """

    name: str
    micro_batch_size: int
    slopes: Floats | None = None
    larger: LargerSizes | None = None
    """Only for a batch of one whose events say nothing about two samples."""
    precision: str = "32-true"
    accumulate_grad_batches: int = 1
    device: str = CUDA
    """Device type whose operators were traced."""
    sequence_length: int | None = None
    only_this_size: str = ""
    """Why the step is known at `micro_batch_size` only; empty where every size is known."""
    measured: bool = False
    """Whether the events come from real steps instead of a trace."""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def device_kind(self) -> DeviceKind:
        """Capabilities of the traced type of device."""
        return DeviceKind.of(self.device)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(p.numel for p in self.parameters if not p.shared_with)

    @property
    def num_trainable(self) -> int:
        """Elements of trainable parameters, tied ones once."""
        return sum(p.numel for p in self.parameters if p.trainable and not p.shared_with)

    @property
    def cautions(self) -> tuple[str, ...]:
        """Sentences on what the figures don't cover: memory that grows, steps that need more than others."""
        found = [f"{remark[0].upper()}{remark[1:]}." for remark in self.remarks]
        if self.growth is not None:
            per_batch, site = self.growth.bytes_per_batch, self.growth.site
            found.insert(
                0,
                f"Memory grows by {format_bytes(per_batch)} per batch{f' (mostly {site})' if site else ''} and had not "
                f"stopped after {self.traced_batches} batches. The figures are those after {self.growth.batches:,}; "
                f"every 100 more need {format_bytes(100 * per_batch)}.",
            )
        return tuple(found)

    @property
    def knows_every_size(self) -> bool:
        """Whether `events_at` answers for any micro-batch size."""
        return self.slopes is not None or self.larger is not None

    def events_at(self, micro_batch_size: int | None = None) -> EventList:
        """Events at a micro-batch size.

        Raises:
            ValueError: If the size is below 1, or differs from the traced one where only that is known.
        """
        if micro_batch_size is None or micro_batch_size == self.micro_batch_size:
            return self.events
        if micro_batch_size < 1:
            raise ValueError(f"`micro_batch_size={micro_batch_size}` must be at least 1.")
        if self.larger is not None:
            return at_size(self.larger.events, self.larger.slopes, self.larger.micro_batch_size, micro_batch_size)
        if self.slopes is None:
            reason = self.only_this_size or "it was traced at one size"
            raise ValueError(
                f"`micro_batch_size={micro_batch_size}`: the step of {self.name} is known at "
                f"{self.micro_batch_size} only ({reason}). Profile it with a batch of that size."
            )
        return at_size(self.events, self.slopes, self.micro_batch_size, micro_batch_size)

    def without_scratch(self) -> "ModelProfile":
        """The step as what counts tensors alone sees it, such as a `MemoryLimit`: no kernel has scratch memory."""
        larger = self.larger
        if larger is not None:
            events, slopes = _without_scratch(larger.events, larger.slopes)
            assert slopes is not None
            larger = replace(larger, events=events, slopes=slopes)
        events, own_slopes = _without_scratch(self.events, self.slopes)
        return replace(self, events=events, slopes=own_slopes, larger=larger)

    def after(self, batches: int) -> "ModelProfile":
        """The profile of a step after so many batches of an epoch; the same one if memory doesn't grow, or no more."""
        growth = self.growth
        if growth is None or batches <= growth.batches:
            return self
        more, site = batches - growth.batches, f"{growth.site or 'kept'} (of {batches - growth.batches} more batches)"
        unit = self.device_kind.rounding_bytes
        kept_bytes = more * (-(-growth.bytes_per_batch // unit) * unit)
        slopes, larger = self.slopes, self.larger
        if slopes is not None:
            slopes = _with_first(slopes)
        if larger is not None:
            events = with_kept(larger.events, kept_bytes, site)
            larger = LargerSizes(events, larger.micro_batch_size, _with_first(larger.slopes))
        events, growth = with_kept(self.events, kept_bytes, site), replace(growth, batches=batches)
        return replace(self, events=events, slopes=slopes, larger=larger, growth=growth)

    # --- disk -------------------------------------------------------------------------------------------------------

    def write(self, file: BinaryIO) -> None:
        """Write in the format of an `.npz` file."""
        header = asdict(replace(self, slopes=None, larger=None))
        for name in ("events", "slopes", "larger"):
            del header[name]
        header["described"], arrays = _packed("", self.events, self.slopes)
        if self.larger is not None:
            header["larger_size"] = self.larger.micro_batch_size
            header["larger_described"], more = _packed("larger_", self.larger.events, self.larger.slopes)
            arrays |= more
        np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)

    @classmethod
    def load(cls, path: Path) -> "ModelProfile":
        """Read what `save` wrote.

        Raises:
            ValueError: If the file holds no profile.
        """
        with np.load(path, allow_pickle=False) as data:
            header: dict[str, Any] = json.loads(str(data["header"]))
            if not isinstance(header, dict):
                raise ValueError(f"{path} is no profile. Delete it.")
            events, slopes = _unpacked("", header.pop("described"), data)
            larger = None
            if "larger_size" in header:
                size, described = header.pop("larger_size"), header.pop("larger_described")
                more, more_slopes = _unpacked("larger_", described, data)
                assert more_slopes is not None
                larger = LargerSizes(more, size, more_slopes)
        header["parameters"] = tuple(ParameterInfo(**{**p, "shape": tuple(p["shape"])}) for p in header["parameters"])
        header["work"] = {phase: tuple(OperatorWork(**row) for row in own) for phase, own in header["work"].items()}
        header["assumptions"], header["remarks"] = tuple(header["assumptions"]), tuple(header["remarks"])
        header["optimizer_groups"] = tuple((name, group) for name, group in header["optimizer_groups"])
        header["growth"] = None if header["growth"] is None else Growth(**header["growth"])
        return cls(events=events, slopes=slopes, larger=larger, **header)


_ARRAYS = ("events", "event_blocks", "sizes", "categories", "sites")


def _packed(prefix: str, events: EventList, slopes: Floats | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step's parts for JSON, and those for an `.npz` file."""
    arrays = {f"{prefix}{name}": getattr(events, name) for name in _ARRAYS}
    if slopes is not None:
        arrays[f"{prefix}slopes"] = slopes
    return {"site_names": events.site_names, "phases": events.phases}, arrays


def _unpacked(prefix: str, described: dict[str, Any], data: Any) -> tuple[EventList, Floats | None]:
    events = EventList(
        **{name: data[f"{prefix}{name}"] for name in _ARRAYS},
        site_names=tuple(described["site_names"]),
        phases=tuple((at, name) for at, name in described["phases"]),
    )
    return events, data[f"{prefix}slopes"] if f"{prefix}slopes" in data.files else None


def _with_first(slopes: Floats) -> Floats:
    """Slopes with that of one more storage before them, which is the same at every size."""
    return np.concatenate((np.zeros((*slopes.shape[:-1], 1)), slopes), axis=-1)


def _without_scratch(events: EventList, slopes: Floats | None) -> tuple[EventList, Floats | None]:
    scratch = is_scratch(events)
    kept = replace(events, sizes=np.where(scratch, 0, events.sizes))
    return kept, None if slopes is None else np.where(scratch, 0.0, slopes)
