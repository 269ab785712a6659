"""Plan for a recipe (`memfit plan`): from the recipe to its workload, and from the plan to plain data."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_memfit.device.host import probe_host
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.estimate.division import NotDividedError
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory import GIB, format_bytes, parse_bytes
from lightning_memfit.nvme.preflight import SAMPLE_BYTES
from lightning_memfit.planner.lock import names_in
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.plan import Plan, is_batching, overlay_of, own_adapter, technique_classes
from lightning_memfit.planner.plan_page import render_plan
from lightning_memfit.planner.progress import Progress, unseen
from lightning_memfit.planner.time import (
    DISK_BYTES_PER_S,
    NETWORK_BYTES_PER_S,
    CalibrationFile,
    Rates,
    calibrated,
    rates_of,
)
from lightning_memfit.planner.tried import Explored, tried_of
from lightning_memfit.planner.workload import (
    DEFAULT_ALLOW,
    DEFAULT_TOLERANCE,
    Limits,
    Workload,
    check_allow,
    check_tolerance,
    check_trainable,
    devices_for,
    facts_of,
    parse_device_count,
)
from lightning_memfit.profile.build import batch_size, resize_batch
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.files import files_read
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.facts import defaults_of
from lightning_memfit.techniques.core.precision import AnyTechnique
from lightning_memfit.techniques.core.registry import strategy_of
from lightning_memfit.techniques.core.setting import Setting

from .errors import user_mistake
from .estimate_recipe import division_in_plans_of, loaded_samples, quiet, ranks_together, target_of
from .made_for import COUNT_BATCHES, made_for, written
from .recipe_files import configs_of, overlay_text, resolve_arguments
from .recipe_run import RecipeRun, load_recipe
from .recipe_schema import MADE_FOR

_DISK_RESERVE = GIB
"""Disk space that ZeRO-Infinity leaves free on a drive."""


def plan_recipe(
    arguments: argparse.Namespace,
    overrides: list[str],
    compare: bool = True,
    progress: Progress = unseen,
    with_page: bool = False,
) -> tuple[dict[str, Any], list[str], str | None] | None:
    """Plan for a recipe; if its step can't be traced, say why and return None.

    Args:
        arguments: The command's arguments.
        overrides: Those of the recipe.
        compare: Compare the plan with the recipe as it is.
        progress: Is told how far the search is.
        with_page: Make the page of all settings that the search knows.

    Returns:
        The plan as plain data with its overlay, and the files and folders that it was made from, some of which may not
        exist.
    """
    with quiet(), ExitStack() as loaded:
        read = loaded.enter_context(files_read())  # to the end: modules build themselves, and steps run, in traces
        run = loaded.enter_context(load_recipe(overrides, arguments.batch_shape, arguments.real_batch))
        run = _of_own_size(run) if arguments.batch_shape is not None else run
        named, device = (None, None) if arguments.device is None else parse_device_count(arguments.device)
        try:
            workload = workload_of(run, target_of(device, run), arguments, named)
            explored: list[Explored] = []
            plan = make_plan(
                workload,
                None if arguments.no_cache else ProfileCache(),
                verify=arguments.verify,
                compare=compare,
                progress=progress,
                observe=(lambda *found: explored.append(tried_of(*found))) if with_page else None,
            )
        except TraceError as error:
            mistake = user_mistake(error)
            if mistake is None:
                print(f"memfit: cannot tell: {error} {run.example}".rstrip(), file=sys.stderr)
                return None
            if "lora" in (arguments.allow or "") and own_adapter(run.callbacks, run.options.precision) is not None:
                raise ValueError(
                    f"{mistake} A search that may choose adapters begins without those of the recipe. Leave `lora` out "
                    "of `--allow`, and every plan keeps them."
                ) from None
            raise mistake from None
        origin = {MADE_FOR: made_for(run.parsed[1], workload.target.name, run.parameters())}
    data = plan.to_dict()

    def laid(one: Plan) -> dict[str, Any]:
        overlay = overlay_of(one, workload, arguments.nvme_path)
        trainer = overlay["trainer"]
        devices = trainer["devices"]
        if not workload.target.device_kind.is_host:  # of processors, Lightning takes a number
            devices = _devices_as_named(run, devices)
        recounted = _counted_in_batches(run, trainer["accumulate_grad_batches"])
        return {**origin, **overlay, "trainer": {**trainer, "devices": devices, **recounted}}

    data["overlay"] = laid(plan) if plan.fits else None
    if data["overlay"] is not None:
        data["notes"] += _said_of_counts(run, data["overlay"]["trainer"])
    data["notes"] += [*run.notes, *_assumed(run, workload, plan, arguments)]
    if compare and workload.own is None:
        reason = own_setting(run, workload.devices.total)[1].rstrip(".")
        data["notes"].append(f"The recipe as it is was not compared: {reason}.")
    page = None
    if with_page:
        texts = [overlay_text(one.plan.summary(), laid(one.plan)) for one in explored[0].tried]
        page = render_plan(data, explored[0], texts)
    return data, [*_files_of(run, read, overrides), str(CalibrationFile(workload.rates.name).path)], page


def _files_of(run: RecipeRun, read: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """Files and folders that a recipe is made of, beside its own: what was read for it, and what it names.

    Folders that the Trainer's arguments name are written to, not read.
    """
    own = {os.path.abspath(path) for path in configs_of(resolve_arguments(overrides))}
    read = {path for path in read if os.path.abspath(path) not in own}
    named = written(run.parsed[1])
    of_trainer = {key: value for key, value in named.items() if key.startswith("trainer.")}
    others = {key: value for key, value in named.items() if key not in of_trainer}
    return sorted({*read, *names_in(others), *filter(os.path.isfile, names_in(of_trainer))})


def workload_of(
    run: RecipeRun, target: Target, arguments: argparse.Namespace, named_devices: int | None = None
) -> Workload:
    """Return what a recipe trains on a target within the limits that the user gave.

    Args:
        run: The recipe.
        target: One device.
        arguments: The command's arguments.
        named_devices: Number of such devices that the user named; None if the user named none.

    Raises:
        ValueError: If the module can't be planned for, or a limit makes no sense.
    """
    check_trainable(run.module)
    if target.lower_bound:
        raise ValueError(
            f"`--device`: no plan can be made. {target.lower_bound} `memfit estimate` shows the lower bound."
        )
    allow = DEFAULT_ALLOW if arguments.allow is None else check_allow(arguments.allow.split(","))
    tolerance = (
        DEFAULT_TOLERANCE if arguments.tolerance is None else check_tolerance(arguments.tolerance, "--tolerance")
    )
    named = arguments.host_memory
    host = parse_bytes(named, "--host-memory") if named is not None else probe_host().available_bytes
    if named is not None and target.device_kind.is_host:
        margin = safety_margin_bytes(host)
        target = replace(target, capacity_bytes=host, margin_bytes=margin, source="--host-memory", counts_tensors=False)
    here = run.devices or _named_here(named_devices, run) or _number_here(arguments.device, target)
    named_here = None if here * run.num_nodes == named_devices else named_devices  # the recipe's machines
    devices = devices_for(named_here, here, run.num_nodes, target.device_kind.is_host)
    rates, disk_bytes = _disk(arguments, calibrated(rates_of(target)))
    replicas = here * run.num_nodes // ranks_together(run.strategy)
    loaded = loaded_samples(run, _own_batching(run), replicas)
    sets_size = run.takes_batch_size and not _has_other_rows(run)
    if replicas > 1 and run.takes_batch_size and not sets_size:
        raise ValueError(f"{_other_rows(run)}, with {replicas} devices. Plan for one: `--trainer.devices 1`.")
    known = technique_classes()
    fixed = tuple(
        callback
        for callback in run.callbacks
        if isinstance(callback, AnyTechnique) and f"{type(callback).__module__}.{type(callback).__name__}" not in known
    )
    return Workload(
        module=run.module,
        batch=run.batch,
        options=run.options,
        samples_per_step=loaded * run.options.accumulate_grad_batches * replicas,
        target=target,
        rates=rates,
        facts=facts_of(run.module, target, run.options),
        limits=Limits(
            host_bytes=host if target.device_kind.has_own_memory else None,
            pinned_bytes=_optional_bytes(arguments.pinned_memory, "--pinned-memory"),
            disk_bytes=disk_bytes,
            disk_writes_per_day=_optional_bytes(arguments.disk_writes_per_day, "--disk-writes-per-day"),
        ),
        allow=allow,
        fixed=fixed,
        adapter=None if "lora" in allow else own_adapter(run.callbacks, run.options.precision),
        loader_batch=None if sets_size else loaded,
        own_micro_batch=_own_sizes(run, replicas)[0],
        batching=_batching(run),
        devices=devices,
        strategies=sets_size,
        tolerance=tolerance,
        own=own_setting(run, devices.total)[0],
    )


def _counted_in_batches(run: RecipeRun, accumulate: int) -> dict[str, int]:
    """The Trainer's options that count batches, for as many samples as in the recipe; none if nothing changes.

    An optimizer step has as many samples under a plan as without it, so a batch has as many times fewer as more are
    accumulated, on all devices together: for validation as for training, whose loaders share `data.batch_size`.

    Args:
        run: The recipe.
        accumulate: `accumulate_grad_batches` under the plan.
    """
    before, trainer = run.options.accumulate_grad_batches, run.config.get("trainer") or {}
    counted = {name: trainer.get(name) for name in COUNT_BATCHES}
    # Floats are shares of an epoch.
    counts = {name: value for name, value in counted.items() if type(value) is int and value > 0}
    if accumulate == before:
        return {}
    recounted = {}
    for name, count in counts.items():
        whole, rest = divmod(count * accumulate, before)
        # An epoch that is cut must not become shorter than what is between two validations.
        recounted[name] = max(1, whole) if name == "val_check_interval" else whole + (rest > 0)
    return recounted


def _devices_as_named(run: RecipeRun, number: int) -> int | list[int]:
    """The Trainer's `devices` under a plan for so many: those that the recipe names by their numbers, where it does.

    Others may be occupied. Where a plan takes fewer, they are the first ones.

    Args:
        run: The recipe.
        number: Devices on each machine.
    """
    said, numbers = (run.config.get("trainer") or {}).get("devices"), run.device_numbers or ()
    are_named = isinstance(said, list) or "," in str(said)
    return list(numbers[:number]) if are_named and number <= len(numbers) else number


def _said_of_counts(run: RecipeRun, planned: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to say of options that count batches, if a plan's `trainer` section has some."""
    own, changed = run.config.get("trainer") or {}, [name for name in COUNT_BATCHES if name in planned]
    if changed:
        changes = ", ".join(f"`trainer.{name}` {own[name]} -> {planned[name]}" for name in changed)
        yield f"For as many samples in batches of another size: {changes}." + (
            " If the validation loader has a batch size of its own, give that option anew beside the plan."
            if "limit_val_batches" in changed
            else ""
        )


def own_setting(run: RecipeRun, all_devices: int) -> tuple[Setting | None, str]:
    """Return what the recipe itself chooses, or None and the reason if no records describe it.

    Args:
        run: The recipe.
        all_devices: Devices that a recipe runs on which takes all there are.
    """
    ranks = all_devices if run.devices is None else run.devices * run.num_nodes
    try:
        setting = Setting.from_callbacks(run.callbacks, run.options.precision)
        if ranks > 1 or run.strategy != "auto":
            try:
                division = division_in_plans_of(replace(run, devices=ranks // run.num_nodes))
            except NotDividedError as error:
                return None, f"`trainer.strategy={run.strategy}`: {error}"
            same = None if division is None else strategy_of(division)
            if same is None:
                return None, f"`trainer.strategy={run.strategy}` is none that plans know"
            setting = setting.choose(same.name, **({"num_nodes": run.num_nodes} if run.num_nodes > 1 else {}))
    except Exception as error:  # whatever its strategy's class raises is no reason to plan nothing
        return None, str(error)
    size, accumulate = _own_sizes(run, ranks)
    return replace(setting, micro_batch_size=size, accumulate_grad_batches=accumulate, world_size=ranks), ""


def _own_sizes(run: RecipeRun, replicas: int) -> tuple[int, int]:
    """Samples of a micro-batch of the recipe itself on one device, and how many micro-batches it accumulates.

    `MicroBatching` at `auto` cuts as few as fit, which are taken for the whole batch.
    """
    own, accumulate = _own_batching(run), run.options.accumulate_grad_batches
    loaded = loaded_samples(run, own, replicas)
    if own is None or own.options.micro_batch_size == "auto":
        return loaded, accumulate
    size = min(own.options.micro_batch_size, loaded)
    return size, accumulate * -(-loaded // size)


def _own_batching(run: RecipeRun) -> Any:
    """The recipe's `MicroBatching`, which a plan replaces by its own; None if it has none."""
    paths = ((one, f"{type(one).__module__}.{type(one).__name__}") for one in run.callbacks)
    return next((one for one, path in paths if is_batching(path)), None)


def _batching(run: RecipeRun) -> dict[str, Any] | None:
    """The arguments that it has in the recipe, as YAML has them."""
    own = _own_batching(run)
    if own is None:
        return None
    specs = run.config["trainer"].get("callbacks") or []
    specs = specs if isinstance(specs, list) else [specs]
    written = next((spec.get("init_args") for spec in specs if is_batching(spec["class_path"])), None) or {}
    kind: Any = type(own)
    defaults = defaults_of(kind)
    return {name: value for name, value in written.items() if value != defaults.get(name)}


def _size_in_data(run: RecipeRun) -> Any:
    """`batch_size` of the recipe's data; None if it has none."""
    return ((run.config.get("data") or {}).get("init_args") or {}).get("batch_size")


def _has_other_rows(run: RecipeRun) -> bool:
    """Whether a batch has other than `batch_size` rows, so that nobody knows how many another size would give.

    Packed sequences, several views of a sample and sequences whose first dimension is time are such.
    """
    said = _size_in_data(run)
    return isinstance(said, int) and said != batch_size(run.batch)


def _other_rows(run: RecipeRun) -> str:
    return (
        f"`data.batch_size={_size_in_data(run)}`, and a batch has {batch_size(run.batch)} rows, so that it can't be "
        "told what another size would load"
    )


def _of_own_size(run: RecipeRun) -> RecipeRun:
    """The run with a batch of as many samples as the recipe's data load, whatever number its shapes were given for."""
    said, given = _size_in_data(run), batch_size(run.batch)
    if not isinstance(said, int) or said == given:
        return run
    note = (
        f"`--batch-shape` has {given} rows and `data.batch_size` is {said}: the plan is for batches of {said} rows. If "
        "yours have others (packed sequences, several views), plan with `--real-batch` instead."
    )
    return replace(run, batch=resize_batch(run.batch, given, said), notes=(*run.notes, note))


def _named_here(named: int | None, run: RecipeRun) -> int | None:
    """Devices of a machine, of those that the user named, where the recipe names no number.

    Raises:
        ValueError: If the recipe's machines can't share them.
    """
    if named is None:
        return None
    here, left = divmod(named, run.num_nodes)
    if left:
        raise ValueError(
            f"`--device` names {named} devices, which the recipe's {run.num_nodes} machines can't share. Name a "
            f"multiple of {run.num_nodes}, or set `--trainer.num_nodes=1`."
        )
    return here


def _number_here(name: str | None, target: Target) -> int:
    """Return the number of devices that `trainer.devices: auto` finds."""
    if name is not None or target.device_kind.is_host:
        return 1
    import torch

    return torch.cuda.device_count()


def _optional_bytes(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, option)


def _disk(arguments: argparse.Namespace, rates: Rates) -> tuple[Rates, int]:
    """Return rates with the measured speed of a named folder, and the bytes of disk that may be used.

    Raises:
        ValueError: If the folder can't be written to, or has no room.
    """
    offered = _optional_bytes(arguments.disk, "--disk")
    if arguments.nvme_path is None:
        return rates, offered or 0
    folder = Path(arguments.nvme_path)
    if not folder.is_dir():
        raise ValueError(f"`--nvme-path {folder}`: there is no such folder. Make it, or name another.")
    free = shutil.disk_usage(folder).free - _DISK_RESERVE
    if free <= 0:
        raise ValueError(f"`--nvme-path {folder}`: the drive is full. Free some of it, or leave the option out.")
    speed = measure_storage(folder, SAMPLE_BYTES)
    both = 2 / (1 / speed.read_bytes_per_s + 1 / speed.write_bytes_per_s)
    return replace(rates, disk_bytes_per_s=both), free if offered is None else min(free, offered)


def _assumed(run: RecipeRun, workload: Workload, plan: Plan, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the plan's assumptions that nobody has measured."""
    if run.takes_batch_size and not workload.strategies:
        yield f"{_other_rows(run)}: it stays, only one device is planned for, and nothing goes to disk."
    elif not workload.strategies:
        yield (
            "The data module has no `batch_size` to set, which strategies need: only one device is planned for, and "
            "nothing goes to disk."
        )
    setting = plan.setting
    if setting is not None and workload.kept_size is not None:
        yield f"Micro-batches stay as large as they are: {workload.kept_size}."
    several = setting is not None and setting.world_size * setting.accumulate_grad_batches > 1
    if setting is not None and several and workload.batching is not None and not workload.is_cut(setting):
        yield (
            "The recipe's `MicroBatching` is left out, as DeepSpeed accumulates by itself: a mean over tokens is one "
            "over those of each micro-batch, and not over those of the whole step."
        )
    elif setting is not None and not workload.is_cut(setting) and setting.micro_batch_size != workload.own_micro_batch:
        yield (
            f"Batches have {setting.micro_batch_size} samples instead of {workload.own_micro_batch}, which is the same "
            "where a loss is a mean over samples. With `MicroBatching` in the recipe, a plan cuts its batches instead: "
            "means over tokens are over the whole step, and a loss that compares samples is refused."
        )
    if plan.written_bytes:
        if arguments.nvme_path is None:
            rate = format_bytes(round(DISK_BYTES_PER_S))
            yield f"The disk is taken to read and write {rate} per second. Name its folder (`--nvme-path`) to measure."
        yield f"A day of training writes about {format_bytes(plan.written_per_day)} to disk on each machine."
    if plan.setting is not None and plan.setting.world_size > workload.devices.per_machine:
        yield f"The network is taken to carry {format_bytes(round(NETWORK_BYTES_PER_S))} per second and machine."
