"""`load_sweep`: a matrix of training runs over processes, sizes, techniques and models, as read from a YAML file.

    title: What is measured
    measure: {warmup_steps: 2, timed_steps: 10, timeout_s: 300}
    base: {model: ..., data: ..., trainer: ...}
    overlays: {...}                                     # named pieces of configuration, for this file
    global_batch_size: 16                               # may be absent; sets the accumulation
    matrix:
      devices: [1, 2]                                   # processes, DDP beyond one
      micro_batch_size: [2, 8]
      sequence_length: [128]
      technique: {none: [], checkpointing: [activation_checkpointing]}
      model: {tiny: [], small: [{model: {init_args: {config: {n_layer: 6}}}}]}
    paths: {micro_batch_size: data.init_args.batch_size, sequence_length: data.init_args.sequence_length}

`technique` and `model` map names to layers like those of an experiment's rows. Every axis may be absent.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lightning_memfit.bench.experiment import (
    QUIET,
    SWEEP,
    Experiment,
    Measurement,
    ReadRecipe,
    Row,
    Settings,
    accelerator,
    check_keys,
    overlay,
    read_document,
    read_measurement,
    resolve_layer,
)

NUMBERS = ("devices", "micro_batch_size", "sequence_length")
CHOICES = ("technique", "model")
_KEYS = ("title", "measure", "base", "overlays", "global_batch_size", "matrix", "paths")
_PATHS = {"micro_batch_size": "data.init_args.batch_size", "sequence_length": "data.init_args.sequence_length"}
_SHORT = {"devices": "p", "micro_batch_size": "b", "sequence_length": "s"}


def load_sweep(path: Path, device: str, read_recipe: ReadRecipe) -> Experiment:
    """Read a sweep."""
    document = read_document(path, _KEYS, required=("title", "base", "matrix"))
    matrix, paths = document["matrix"], {**_PATHS, **(document.get("paths") or {})}
    check_keys(matrix, (*NUMBERS, *CHOICES), "matrix")
    check_keys(paths, tuple(_PATHS), "paths")
    for axis in NUMBERS:
        _check_numbers(axis, matrix.get(axis))
    measurement = read_measurement(document.get("measure") or {})
    base = overlay(overlay(QUIET, document["base"]), {"trainer": {"accelerator": accelerator(device)}})
    rows = []
    for point in _points(matrix):
        settings = base
        for axis in CHOICES:
            for layer in _layers(matrix, axis, point):
                settings = overlay(settings, resolve_layer(layer, document.get("overlays") or {}, read_recipe))
        settings = _with_numbers(settings, point, paths, document.get("global_batch_size"))
        settings = overlay(settings, {"trainer": {"max_steps": measurement.num_steps}})
        rows.append(_row(point, settings, measurement))
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


def _row(point: dict[str, Any], settings: Settings, measurement: Measurement) -> Row:
    parts = [f"{_SHORT[axis]}{point[axis]}" if axis in _SHORT else str(point[axis]) for axis in point]
    return Row(re.sub(r"[^\w.-]+", "-", "_".join(parts)), " ".join(parts), settings, measurement, point=point)


def _points(matrix: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    axes = [axis for axis in (*NUMBERS, *CHOICES) if axis in matrix]
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
    nested = {innermost: value}
    for key in reversed(outer):
        nested = {key: nested}
    return nested
