"""`Experiment`: a base configuration and named rows that change it, as read from a YAML file.

    title: What is compared
    source: {name: ..., hardware: ..., note: ...}       # of the reference figures; may be absent
    notes: [...]                                        # what explains the figures; may be absent
    measure: {warmup_steps: 3, timed_steps: 20, timeout_s: 1800}
    base: {model: ..., data: ..., trainer: ...}         # as for `memfit fit`
    overlays: {1x4: {...}}                              # named pieces of configuration, for this file
    scales: {small: {base: {...}, measure: {...}, overlays: {...}}, full: {}}       # laid over those above
    rows:
      vanilla: {title: ..., layers: [], reference: {samples_per_second: 8.86, memory_mb: 14949}}
      all: {layers: [1x4, activation_checkpointing, {trainer: {precision: 16-mixed}}]}
      theirs: {group: vanilla, peer: hf_trainer, options: {optim: adamw_torch}}     # another tool trains it

A layer is the name of an overlay, of a technique, of a recipe or of a file, or the configuration itself. A `peer` is
one of `benchmarks/peers` in a checkout, and `options` are that tool's own. Rows of one `group` are compared.

`overlay` merges configurations; `load_experiment` reads and checks the file, and resolves every row.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_memfit.extras import is_installed
from lightning_memfit.memory.kind import MODELLED, DeviceKind

# --- merging configurations, by the rules of recipes ------------------------------------------------------------------


Settings = dict[str, Any]


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Settings:
    """Return `base` with `top` laid over it; neither is changed.

    Mappings are merged key by key, everything else is replaced. `name+` appends to the list `name`. Where `class_path`
    changes, the arguments of the former class are dropped.
    """
    result = deepcopy(dict(base))
    if "class_path" in top and top["class_path"] != base.get("class_path"):
        result.pop("init_args", None)
    for key, value in top.items():
        if key.endswith("+"):
            result[key[:-1]] = _appended(key, result.get(key[:-1]), value)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = overlay(result[key], value)
        elif isinstance(value, Mapping):
            result[key] = overlay({}, value)  # a fragment's `name+` without a list below it
        else:
            result[key] = deepcopy(value)
    return result


def _appended(key: str, before: Any, value: Any) -> list[Any]:
    before = [] if before is None else before
    if not isinstance(before, list) or not isinstance(value, list):
        raise ValueError(f"`{key}` appends to a list, but found {type(value).__name__} on {type(before).__name__}.")
    return [*deepcopy(before), *deepcopy(value)]


# --- experiments ------------------------------------------------------------------------------------------------------


ReadRecipe = Callable[[str], Mapping[str, Any]]
"""Returns the configuration behind the name of a recipe or file; raises `ValueError` for an unknown one."""

_KEYS = ("title", "source", "notes", "measure", "base", "overlays", "scales", "rows")
_ACCELERATORS = {name: DeviceKind.of(name).accelerator for name in MODELLED}

SWEEP = "sweep"

# Turns off what a measured run leaves out, so that nothing but training steps takes time or memory.
QUIET: Settings = {
    "trainer": {
        "devices": 1,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
}


@dataclass(frozen=True)
class Measurement:
    """Which part of a run is measured."""

    warmup_steps: int = 3
    """Optimizer steps before the clock starts; live tensors are tracked during them, but for two steps at least."""
    timed_steps: int = 20
    """Optimizer steps that are timed."""
    timeout_s: float = 1800.0
    """Seconds after which a row is stopped."""

    def __post_init__(self) -> None:
        for name, low in (("warmup_steps", 1), ("timed_steps", 1), ("timeout_s", 0.001)):
            if getattr(self, name) < low:
                raise ValueError(f"`measure.{name}={getattr(self, name)}` must be at least {low}.")

    @property
    def untimed_steps(self) -> int:
        """Optimizer steps that are tracked and not timed: the first step ends before there are optimizer states."""
        return max(2, self.warmup_steps)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.untimed_steps + self.timed_steps


@dataclass(frozen=True)
class Row:
    """One run of an experiment."""

    name: str
    title: str
    settings: Settings
    """Resolved configuration, complete for the command line's parser."""
    measurement: Measurement
    reference: dict[str, float] = field(default_factory=dict)
    """Figures of the source: `seconds`, `samples_per_second`, `memory_mb` and whatever else it gives."""
    point: dict[str, Any] = field(default_factory=dict)
    """Position of the run in a sweep's matrix; empty in an experiment."""
    group: str = ""
    """Name shared by rows that are compared with each other; may be empty."""
    peer: str = ""
    """Tool that trains the row; empty for this package."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the peer, in addition to the settings."""

    @property
    def key(self) -> str:
        """Hash of everything that decides what is measured."""
        parts: list[Any] = [self.settings, self.measurement.warmup_steps, self.measurement.timed_steps]
        parts += [self.peer, self.options] if self.peer else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Experiment:
    """Rows of one experiment at one scale on one kind of device, or of a sweep (`scale` is `SWEEP`)."""

    name: str
    title: str
    scale: str
    device: str
    rows: tuple[Row, ...]
    source: dict[str, str] = field(default_factory=dict)
    """`name`, `hardware` and `note` for the reference figures."""
    notes: tuple[str, ...] = ()
    """Explanations of the figures, one or more sentences each, which contain no figures themselves."""

    @property
    def folder_name(self) -> str:
        """Name of the folder for its results."""
        return f"{self.name}_{self.device}" if self.scale == SWEEP else f"{self.name}_{self.device}_{self.scale}"

    def only(self, names: list[str]) -> tuple[Row, ...]:
        """Return the rows with these names, or all rows if no name is given."""
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                raise ValueError(f"`--only {name}`: there is no such row. {closest(name, known)}")
        return tuple(row for row in self.rows if not names or row.name in names)


def load_experiment(path: Path, scale: str, device: str, read_recipe: ReadRecipe) -> Experiment:
    """Read an experiment at a scale."""
    document = read_document(path, _KEYS, required=("title", "base", "rows"))
    scales = document.get("scales") or {"full": {}}
    if scale not in scales:
        raise ValueError(f"`--scale {scale}`: {path.name} has no such scale. {closest(scale, list(scales))}")
    chosen = scales[scale] or {}
    check_keys(chosen, ("base", "measure", "overlays"), f"scales.{scale}")
    measurement = read_measurement({**(document.get("measure") or {}), **(chosen.get("measure") or {})})
    base = overlay(overlay(QUIET, document["base"]), {"trainer": {"accelerator": accelerator(device)}})
    overlays = overlay(document.get("overlays") or {}, chosen.get("overlays") or {})
    rows = []
    for name, entry in document["rows"].items():
        entry = entry or {}
        if not re.fullmatch(r"[\w.-]+", str(name)):
            raise ValueError(
                f"`rows` has the name {name!r}, which is to be a file's: use letters, digits, `_`, `-`, `.`."
            )
        check_keys(entry, ("title", "layers", "reference", "group", "peer", "options"), f"rows.{name}")
        settings = overlay(base, chosen.get("base") or {})
        for layer in entry.get("layers") or []:
            settings = overlay(settings, resolve_layer(layer, overlays, read_recipe))
        settings = overlay(settings, {"trainer": {"max_steps": measurement.num_steps}})
        rows.append(_row(name, entry, settings, measurement))
    source = document.get("source") or {}
    notes = tuple(document.get("notes") or ())
    return Experiment(path.stem, document["title"], scale, device, tuple(rows), source, notes)


def _row(name: str, entry: Mapping[str, Any], settings: Settings, measurement: Measurement) -> Row:
    peer = entry.get("peer", "")
    if peer and not is_installed("benchmarks"):
        raise ValueError(
            f"`rows.{name}.peer={peer}`: other tools are run from the root of a checkout (benchmarks/peers)."
        )
    if entry.get("options") and not peer:
        raise ValueError(f"`rows.{name}.options` are for a `peer`; what this package does stands in `layers`.")
    return Row(
        name,
        entry.get("title", name),
        settings,
        measurement,
        reference=entry.get("reference") or {},
        group=entry.get("group", ""),
        peer=peer,
        options=entry.get("options") or {},
    )


def accelerator(device: str) -> str:
    """Return Lightning's name for `cpu` or `cuda`."""
    if device not in _ACCELERATORS:
        raise ValueError(f"`--device {device}` must be one of {', '.join(_ACCELERATORS)}.")
    return _ACCELERATORS[device]


def read_document(path: Path, known: tuple[str, ...], required: tuple[str, ...]) -> dict[str, Any]:
    """Read a YAML mapping and check its keys."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds {type(document).__name__} where a mapping with {', '.join(required)} must be.")
    check_keys(document, known, path.name)
    for key in required:
        if not document.get(key):
            raise ValueError(f"{path.name} lacks `{key}`. It needs {', '.join(required)}.")
    return document


def check_keys(entry: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse misspelt keys, which would otherwise be ignored."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"`{where}` holds {entry!r} where a mapping with {', '.join(known)} must be.")
    for key in entry:
        if key not in known:
            raise ValueError(f"`{where}` has no key `{key}`. {closest(str(key), list(known))}")


def read_measurement(entry: Mapping[str, Any]) -> Measurement:
    """Make a measurement from plain data."""
    check_keys(entry, tuple(f.name for f in fields(Measurement)), "measure")
    return Measurement(**entry)


def resolve_layer(
    layer: str | Mapping[str, Any], overlays: Mapping[str, Any], read_recipe: ReadRecipe
) -> Mapping[str, Any]:
    """Return the configuration of a layer."""
    if isinstance(layer, Mapping):
        return layer
    if not isinstance(layer, str):
        raise ValueError(f"`layers` holds {layer!r}; a layer is a name or a mapping.")
    return overlays[layer] if layer in overlays else read_recipe(layer)


def closest(name: str, known: list[str]) -> str:
    """Return the part of an error message that suggests what was probably meant."""
    return f"Closest: {', '.join(get_close_matches(name, known, n=3) or known)}."
