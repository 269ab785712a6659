"""Sizes of well-known architectures, from their papers and model cards: data for `memfit estimate --model NAME`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from lightning_memfit.memory.kind import CUDA, DeviceType
from lightning_memfit.optim.optimizers import OPTIMIZERS

Kind = Literal[
    "causal", "encoder-decoder", "text classification", "masked", "image classification", "speech recognition"
]
"""What a model is trained on, which decides the batch."""


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def traceable_optimizers() -> tuple[str, ...]:
    """Names of the optimizers that a named run may have: a trace can't follow compiled steps, as torchao's are."""
    return tuple(record.name for record in OPTIMIZERS.values() if record.cls.package in ("torch", "bitsandbytes"))


@dataclass(frozen=True)
class NamedRun:
    """A training run of a model that is known by name."""

    model: str
    """Name in `ARCHITECTURES`, a folder with a `config.json`, or such a file."""
    micro_batch_size: int = 1
    sequence_length: int | None = None
    """Tokens per sample; the architecture's usual length by default."""
    precision: str = "32-true"
    optimizer: str = "adamw"
    checkpointing: Literal["none", "full"] = "none"
    attention: Literal["sdpa", "eager"] | None = None
    """What transformers chooses by default: `sdpa` for every model that has it."""
    accumulate_grad_batches: int = 1
    device: DeviceType = CUDA
    capability: tuple[int, int] = (8, 0)
    techniques: tuple[str, ...] = ()
    """Names and options of the techniques whose callbacks are traced, as the user wrote them."""

    def __post_init__(self) -> None:
        known = {"precision": (self.precision, PRECISIONS), "optimizer": (self.optimizer, traceable_optimizers())}
        for name, (choice, choices) in known.items():
            if choice not in choices:
                raise ValueError(f"`{name}={choice!r}` is unknown. Choose from: {', '.join(choices)}.")


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face model without weights."""

    name: str
    model_class: str
    """Class in `transformers`."""
    model_type: str
    """As a `config.json` names it."""
    config: Mapping[str, Any]
    """Entries that differ from the configuration's defaults."""
    kind: Kind
    num_parameters: int
    """Parameters of this class according to the source, tied ones once."""
    sequence_length: int | None
    """Default length: the one the model was trained with, 2048 at most. None for images."""
    max_sequence_length: int | None
    source: str
    dtype: str | None = None
    """Type of the published weights, which `from_pretrained` gives them; None for float32."""
    hub: tuple[str, ...] = ()
    """Names on the Hugging Face hub."""


def _read_table() -> dict[str, Architecture]:
    table = json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))
    return {name: Architecture(name, **{**entry, "hub": tuple(entry["hub"])}) for name, entry in table.items()}


ARCHITECTURES: dict[str, Architecture] = _read_table()
"""Well-known architectures by their short names; the table is `architectures.json`."""

_ON_HUB = {hub_name.lower(): architecture for architecture in ARCHITECTURES.values() for hub_name in architecture.hub}
_ALIASES = {name.rpartition("/")[2]: architecture for name, architecture in _ON_HUB.items()} | ARCHITECTURES


def known_configuration(name: str) -> dict[str, Any] | None:
    """What the `config.json` of a well-known model says, by its name on the hub; None if it isn't in the table."""
    architecture = _ON_HUB.get(name.lower())
    if architecture is None:
        return None
    entries = {"model_type": architecture.model_type, "architectures": [architecture.model_class]}
    return {**entries, **({"dtype": architecture.dtype} if architecture.dtype else {}), **architecture.config}


def find_architecture(name: str) -> Architecture:
    """Look an architecture up by its short name or its name on the hub; upper case doesn't matter.

    Raises:
        ValueError: If there is none of that name; lists the closest.
    """
    if is_known(name):
        return (_ALIASES | _ON_HUB)[name.lower()]
    key = name.rpartition("/")[2].lower()
    closest = get_close_matches(key, ARCHITECTURES, n=5, cutoff=0.4) or list(ARCHITECTURES)
    raise ValueError(
        f"`--model {name}` is neither a known architecture nor a local folder or file with a Hugging Face config. "
        f"Closest: {', '.join(closest)}. Models of the hub are written owner/name. For your own LightningModule give "
        "`--config RECIPE`."
    )


def is_known(name: str) -> bool:
    """Whether a short name, or a name on the hub, is in the table."""
    return name.lower() in (_ON_HUB if "/" in name else _ALIASES)
