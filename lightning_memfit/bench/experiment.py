"""`Experiment`: measured runs, as read from a YAML file that lists rows or a matrix.

An experiment is a base configuration and named rows that change it:

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

A sweep has `title`, `measure`, `base` and `overlays`, too, and instead of rows every point of a matrix over processes,
sizes, techniques and models:

    global_batch_size: 16                               # may be absent; sets the accumulation
    matrix:
      devices: [1, 2]                                   # processes, DDP beyond one
      micro_batch_size: [2, 8]
      sequence_length: [128]
      technique: {none: [], checkpointing: [activation_checkpointing]}
      model: {tiny: [], small: [{model: {init_args: {config: {n_layer: 6}}}}]}
    paths: {micro_batch_size: data.init_args.batch_size, sequence_length: data.init_args.sequence_length}

`technique` and `model` map names to layers. Every axis may be absent.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import reduce
from itertools import product
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

_KEYS = ("title", "measure", "base", "overlays")
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
    document = _read_document(path, ("source", "notes", "scales"), "rows")
    scales = document.get("scales") or {"full": {}}
    if scale not in scales:
        raise ValueError(f"`--scale {scale}`: {path.name} has no such scale. {closest(scale, list(scales))}")
    chosen = scales[scale] or {}
    _check_keys(chosen, ("base", "measure", "overlays"), f"scales.{scale}")
    measurement = _read_measurement({**(document.get("measure") or {}), **(chosen.get("measure") or {})})
    base = _base(document, device)
    overlays = overlay(document.get("overlays") or {}, chosen.get("overlays") or {})
    rows = []
    for name, entry in document["rows"].items():
        entry = entry or {}
        if not re.fullmatch(r"[\w.-]+", str(name)):
            raise ValueError(
                f"`rows` has the name {name!r}, which is to be a file's: use letters, digits, `_`, `-`, `.`."
            )
        _check_keys(entry, ("title", "layers", "reference", "group", "peer", "options"), f"rows.{name}")
        settings = overlay(base, chosen.get("base") or {})
        settings = _with_layers(settings, entry.get("layers") or [], overlays, read_recipe)
        settings = overlay(settings, {"trainer": {"max_steps": measurement.num_steps}})
        rows.append(_row(name, entry, settings, measurement))
    source, notes = document.get("source") or {}, tuple(document.get("notes") or ())
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


def _base(document: Mapping[str, Any], device: str) -> Settings:
    """Return the configuration that all rows begin with."""
    if device not in _ACCELERATORS:
        raise ValueError(f"`--device {device}` must be one of {', '.join(_ACCELERATORS)}.")
    return overlay(overlay(QUIET, document["base"]), {"trainer": {"accelerator": _ACCELERATORS[device]}})


def _read_document(path: Path, more: tuple[str, ...], runs: str) -> dict[str, Any]:
    """Read a YAML mapping with `_KEYS`, more keys, and the one that says what is run; check its keys."""
    required = ("title", "base", runs)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds {type(document).__name__} where a mapping with {', '.join(required)} must be.")
    _check_keys(document, (*_KEYS, *more, runs), path.name)
    for key in required:
        if not document.get(key):
            raise ValueError(f"{path.name} lacks `{key}`. It needs {', '.join(required)}.")
    return document


def _check_keys(entry: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse misspelt keys, which would otherwise be ignored."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"`{where}` holds {entry!r} where a mapping with {', '.join(known)} must be.")
    for key in entry:
        if key not in known:
            raise ValueError(f"`{where}` has no key `{key}`. {closest(str(key), list(known))}")


def _read_measurement(entry: Mapping[str, Any]) -> Measurement:
    """Make a measurement from plain data."""
    _check_keys(entry, tuple(f.name for f in fields(Measurement)), "measure")
    return Measurement(**entry)


def _with_layers(
    settings: Settings, layers: Sequence[Any], overlays: Mapping[str, Any], read_recipe: ReadRecipe
) -> Settings:
    """Lay overlays, techniques, recipes and configurations over settings, one after the other."""
    for layer in layers:
        if isinstance(layer, str):
            settings = overlay(settings, overlays[layer] if layer in overlays else read_recipe(layer))
        elif isinstance(layer, Mapping):
            settings = overlay(settings, layer)
        else:
            raise ValueError(f"`layers` holds {layer!r}; a layer is a name or a mapping.")
    return settings


def closest(name: str, known: list[str]) -> str:
    """Return the part of an error message that suggests what was probably meant."""
    return f"Closest: {', '.join(get_close_matches(name, known, n=3) or known)}."


# --- sweeps -----------------------------------------------------------------------------------------------------------


_NUMBERS = ("devices", "micro_batch_size", "sequence_length")
_CHOICES = ("technique", "model")
_PATHS = {"micro_batch_size": "data.init_args.batch_size", "sequence_length": "data.init_args.sequence_length"}
_SHORT = {"devices": "p", "micro_batch_size": "b", "sequence_length": "s"}


def load_sweep(path: Path, device: str, read_recipe: ReadRecipe) -> Experiment:
    """Read a sweep."""
    document = _read_document(path, ("global_batch_size", "paths"), "matrix")
    matrix, paths = document["matrix"], {**_PATHS, **(document.get("paths") or {})}
    _check_keys(matrix, (*_NUMBERS, *_CHOICES), "matrix")
    _check_keys(paths, tuple(_PATHS), "paths")
    for axis in _NUMBERS:
        _check_numbers(axis, matrix.get(axis))
    measurement = _read_measurement(document.get("measure") or {})
    base, overlays, rows = _base(document, device), document.get("overlays") or {}, []
    for point in _points(matrix):
        settings = base
        for axis in _CHOICES:
            settings = _with_layers(settings, _layers(matrix, axis, point), overlays, read_recipe)
        settings = _with_numbers(settings, point, paths, document.get("global_batch_size"))
        settings = overlay(settings, {"trainer": {"max_steps": measurement.num_steps}})
        parts = [f"{_SHORT[axis]}{point[axis]}" if axis in _SHORT else str(point[axis]) for axis in point]
        name = re.sub(r"[^\w.-]+", "-", "_".join(parts))
        rows.append(Row(name, " ".join(parts), settings, measurement, point=point))
    if len({row.name for row in rows}) < len(rows):
        raise ValueError("Some points of `matrix` have the same name. Name techniques and models by different letters.")
    return Experiment(path.stem, document["title"], SWEEP, device, tuple(rows))


def write_wandb_sweep(sweep: Experiment, file: Path, command: Sequence[str]) -> None:
    """Write the configuration of a Weights & Biases sweep that has one run for each point.

    `wandb sweep FILE` registers it, and `wandb agent ID` on any number of machines works it off, a point at a time.
    """
    document = {
        "name": f"{sweep.name}-{sweep.device}",
        "description": sweep.title,
        "program": command[0],
        "method": "grid",
        "parameters": {"only": {"values": [row.name for row in sweep.rows]}},
        "command": [*command, "${args}"],
    }
    try:
        with file.open("x", encoding="utf-8") as opened:
            yaml.safe_dump(document, opened, sort_keys=False)
    except OSError as error:
        raise ValueError(f"`--sweep {file}` can't be written: {error.strerror}. Name a new file.") from error


def _points(matrix: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    axes = [axis for axis in (*_NUMBERS, *_CHOICES) if axis in matrix]
    for values in product(*(list(matrix[axis]) for axis in axes)):
        yield {"devices": 1, **dict(zip(axes, values, strict=True))}


def _layers(matrix: Mapping[str, Any], axis: str, point: Mapping[str, Any]) -> list[Any]:
    if axis not in matrix:
        return []
    if not isinstance(matrix[axis], Mapping):
        raise ValueError(f"`matrix.{axis}` holds {matrix[axis]!r} where a mapping of names to lists of layers must be.")
    return list(matrix[axis][point[axis]] or [])


def _check_numbers(axis: str, values: Any) -> None:
    if values is None:
        return
    if not isinstance(values, list) or not values or any(not isinstance(v, int) or v < 1 for v in values):
        raise ValueError(f"`matrix.{axis}={values!r}` must be a list of positive integers, for example [1, 2].")


def _with_numbers(
    settings: Settings, point: Mapping[str, Any], paths: Mapping[str, str], global_batch_size: int | None
) -> Settings:
    devices = point["devices"]
    trainer: Settings = {"devices": devices}
    if devices > 1 and "strategy" not in settings["trainer"]:
        trainer["strategy"] = "ddp"
    settings = overlay(settings, {"trainer": trainer})
    for axis, path in paths.items():
        if axis in point:
            settings = overlay(settings, _nested(path, point[axis]))
    if global_batch_size is None:
        return settings
    micro = point.get("micro_batch_size")
    if micro is None:
        raise ValueError("`global_batch_size` sets the accumulation of `matrix.micro_batch_size`, which is absent.")
    strategy = settings["trainer"].get("strategy")
    together = strategy.get("init_args", {}).get("tensor_parallel_size", 1) if isinstance(strategy, Mapping) else 1
    replicas = max(1, devices // together)  # of ranks that compute on one batch together, if that many can be
    if global_batch_size % (micro * replicas):
        raise ValueError(
            f"`global_batch_size={global_batch_size}` is no multiple of micro-batch {micro} x {replicas} processes "
            "that see different samples. Choose sizes that divide it."
        )
    return overlay(settings, {"trainer": {"accumulate_grad_batches": global_batch_size // (micro * replicas)}})


def _nested(path: str, value: Any) -> Settings:
    *outer, innermost = path.split(".")
    return reduce(lambda nested, key: {key: nested}, reversed(outer), {innermost: value})
