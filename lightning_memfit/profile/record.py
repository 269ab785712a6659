"""`ModelProfile`: what is known about a training step. Plain data; reading one needs numpy, not torch."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_memfit.profile.events import EventList, Floats, at_size

FORMAT = 1


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the module."""

    name: str
    numel: int
    itemsize: int
    """Bytes per element as stored while training."""
    trainable: bool = True
    dims: int = 1
    """Number of dimensions; norms and biases have one."""
    shared_with: str = ""
    """Name of the parameter it is tied to, if any; tied parameters count once."""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelProfile:
    """One traced training step of a module, for any micro-batch size.

    `events` holds the sizes at `micro_batch_size`; `slopes` the bytes every storage grows by per sample, where two
    traces agreed in structure.
    """

    name: str
    events: EventList
    micro_batch_size: int
    parameters: tuple[ParameterInfo, ...]
    slopes: Floats | None = None
    precision: str = "32-true"
    accumulate_grad_batches: int = 1
    device: str = "cuda"
    """Device type whose operators were traced."""
    optimizer: str = ""
    sequence_length: int | None = None
    num_blocks: int = 0
    traced_blocks: int = 0
    block_class: str = ""
    flops: dict[str, int] = field(default_factory=dict)
    """FLOPs of one micro-batch of `micro_batch_size` by phase."""
    block_flops: dict[str, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    """Operators by phase of the same micro-batch that compute something, views left out."""
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes by phase that operators other than matrix products read and write."""
    attention_kernels: dict[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    only_this_size: str = ""
    """Why the step is known at `micro_batch_size` only; empty where any size can be had."""
    measured: bool = False
    """Whether the events come from real steps instead of a trace."""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(p.numel for p in self.parameters if not p.shared_with)

    @property
    def num_trainable(self) -> int:
        """Elements of trainable parameters, tied ones once."""
        return sum(p.numel for p in self.parameters if p.trainable and not p.shared_with)

    def events_at(self, micro_batch_size: int | None = None) -> EventList:
        """Events at a micro-batch size.

        Raises:
            ValueError: If the size is below 1, or differs from the traced one where only that is known.
        """
        if micro_batch_size is None or micro_batch_size == self.micro_batch_size:
            return self.events
        if micro_batch_size < 1:
            raise ValueError(f"`micro_batch_size={micro_batch_size}` must be at least 1.")
        if self.slopes is None:
            reason = self.only_this_size or "it was traced at one size"
            raise ValueError(
                f"`micro_batch_size={micro_batch_size}`: the step of {self.name} is known at "
                f"{self.micro_batch_size} only ({reason}). Profile it with a batch of that size."
            )
        return at_size(self.events, self.slopes, self.micro_batch_size, micro_batch_size)

    # --- disk -------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write to an `.npz` file, in place of an older profile of the same key."""
        header = asdict(self)
        for name in ("events", "slopes"):
            del header[name]
        header["format"] = FORMAT
        header["site_names"] = self.events.site_names
        header["phases"] = self.events.phases
        arrays = {name: getattr(self.events, name) for name in _ARRAYS}
        if self.slopes is not None:
            arrays["slopes"] = self.slopes
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{np.random.default_rng().integers(1 << 62)}.partial")
        with partial.open("wb") as file:
            np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "ModelProfile":
        """Read what `save` wrote.

        Raises:
            ValueError: If the file was written by another format version.
        """
        with np.load(path, allow_pickle=False) as data:
            header: dict[str, Any] = json.loads(str(data["header"]))
            if header.pop("format") != FORMAT:
                raise ValueError(f"{path} has another format than {FORMAT}. Delete it.")
            events = EventList(
                **{name: data[name] for name in _ARRAYS},
                site_names=tuple(header.pop("site_names")),
                phases=tuple((at, name) for at, name in header.pop("phases")),
            )
            slopes = data["slopes"] if "slopes" in data.files else None
        header["parameters"] = tuple(ParameterInfo(**{**p, "shape": tuple(p["shape"])}) for p in header["parameters"])
        header["assumptions"] = tuple(header["assumptions"])
        return cls(events=events, slopes=slopes, **header)


_ARRAYS = ("events", "event_blocks", "sizes", "categories", "sites")
