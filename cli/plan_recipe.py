"""Plan for a recipe (`memfit plan`): from the recipe to its workload, and from the plan to plain data."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_memfit.device.host import probe_host
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.estimate.division import NotDividedError
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory import GIB, format_bytes, parse_bytes
from lightning_memfit.nvme.preflight import SAMPLE_BYTES
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.plan import Plan, is_batching, overlay_of, own_adapter, technique_classes
from lightning_memfit.planner.plan_page import render_plan
from lightning_memfit.planner.rates import DISK_BYTES_PER_S, NETWORK_BYTES_PER_S, Rates, calibrated, rates_of
from lightning_memfit.planner.search import Progress, unseen
from lightning_memfit.planner.tried import Explored, tried_of
from lightning_memfit.planner.workload import (
    DEFAULT_ALLOW,
    KEEP_NUMBERS,
    Devices,
    Limits,
    Workload,
    check_allow,
    check_trainable,
    facts_of,
    tolerance_of,
)
from lightning_memfit.profile.build import batch_size, resize_batch
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.facts import defaults_of
from lightning_memfit.techniques.core.precision import AnyTechnique
from lightning_memfit.techniques.core.registry import strategy_of
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import Numerics

from .errors import user_mistake
from .estimate_recipe import RecipeRequest, devices_here, division_in_plans_of, quiet, ranks_together, target_of
from .made_for import COUNT_BATCHES, made_for
from .recipe_files import overlay_text
from .recipe_run import RecipeRun, load_recipe
from .recipe_schema import MADE_FOR

_DISK_RESERVE = GIB
"""Disk space that ZeRO-Infinity leaves free on a drive."""


@dataclass(frozen=True)
class PlanRequest(RecipeRequest):
    """What a command line asks of a plan, read once; sizes in bytes."""

    allow: frozenset[Numerics] = DEFAULT_ALLOW
    tolerance: float = KEEP_NUMBERS
    host_bytes: int | None = None
    """None for what is free here."""
    limits: Limits = field(default_factory=Limits)
    """Of page-locked memory and disk."""
    nvme_path: str | None = field(default_factory=lambda: os.environ.get("MEMFIT_NVME_PATH"))

    @classmethod
    def of(cls, arguments: argparse.Namespace, recipe: Sequence[str]) -> PlanRequest:
        """Read the command's own arguments."""

        def size(name: str) -> int | None:
            text = getattr(arguments, name)
            return None if text is None else parse_bytes(text, f"--{name.replace('_', '-')}")

        allow = arguments.allow
        return cls(
            allow=DEFAULT_ALLOW if allow is None else check_allow(allow.split(",")),
            tolerance=tolerance_of(arguments.prefer, allow, "--prefer"),
            host_bytes=size("host_memory"),
            limits=Limits(None, size("disk"), size("disk_writes_per_day"), size("pinned_memory")),
            nvme_path=arguments.nvme_path,
            **cls.shared(arguments, recipe),
        )


def plan_recipe(
    request: PlanRequest, compare: bool = True, progress: Progress = unseen, with_page: bool = False
) -> tuple[dict[str, Any], str | None] | None:
    """Plan for a recipe; if its step can't be traced, say why and return None."""
    with quiet(), load_recipe(list(request.recipe), request.batch_shape, request.real_batch) as run:
        run = _of_own_size(run) if request.batch_shape is not None else run
        try:
            workload = workload_of(run, target_of(request.device, run), request)
            explored: list[Explored] = []
            plan = make_plan(
                workload,
                ProfileCache() if request.use_cache else None,
                compare=compare,
                progress=progress,
                observe=(lambda *found: explored.append(tried_of(*found))) if with_page else None,
            )
        except TraceError as error:
            mistake = user_mistake(error)
            if mistake is None:
                print(f"memfit: cannot tell: {error} {run.example}".rstrip(), file=sys.stderr)
                return None
            raise mistake from None
    data = plan.to_dict()

    def laid(one: Plan) -> dict[str, Any]:
        overlay = overlay_of(one, workload, request.nvme_path)
        trainer = overlay["trainer"]
        devices = trainer["devices"]
        if not workload.target.device_kind.is_host:  # of processors, Lightning takes a number
            devices = _devices_as_named(run, devices)
        recounted = _counted_in_batches(run, trainer["accumulate_grad_batches"])
        stamp = {MADE_FOR: made_for(run.config, workload.target.name)}
        return {**stamp, **overlay, "trainer": {**trainer, "devices": devices, **recounted}}

    data["overlay"] = laid(plan) if plan.fits else None
    if data["overlay"] is not None:
        data["notes"] += _said_of_counts(run, data["overlay"]["trainer"])
    data["notes"] += [*run.notes, *_assumed(run, workload, plan, request.nvme_path)]
    if compare and workload.own is None:
        reason = own_setting(run, workload.devices.total)[1].rstrip(".")
        data["notes"].append(f"The recipe as it is was not compared: {reason}.")
    page = None
    if with_page:
        texts = [overlay_text(one.plan.summary(), laid(one.plan)) for one in explored[0].tried]
        page = render_plan(data, explored[0], texts)
    return data, page


def workload_of(run: RecipeRun, target: Target, request: PlanRequest) -> Workload:
    """Return what a recipe trains on a target within the limits that the user gave."""
    check_trainable(run.module)
    host = request.host_bytes if request.host_bytes is not None else probe_host().available_bytes
    if request.host_bytes is not None and target.device_kind.is_host and not target.counts_tensors:
        target = replace(target, capacity_bytes=host, margin_bytes=safety_margin_bytes(host), source="--host-memory")
    here = devices_here(run, request.device, request.num_devices, target) or 1
    is_named = request.num_devices not in (None, here * run.num_nodes)  # others than the recipe's machines have
    devices = Devices(request.num_devices or 1) if is_named else Devices(here, run.num_nodes)
    if target.device_kind.is_host and devices.total > 1:
        raise ValueError(
            f"{devices.total} processes on CPUs are not planned for: they share memory and cores. Set "
            "`--trainer.devices 1`, or name a GPU with `--device`."
        )
    rates, disk_bytes = _disk(request, calibrated(rates_of(target)))
    replicas = here * run.num_nodes // ranks_together(run.strategy)
    loaded, own_size, _ = run.sizes(replicas)
    sets_size = run.takes_batch_size and not run.other_rows
    if replicas > 1 and run.takes_batch_size and not sets_size:
        raise ValueError(f"{run.other_rows}, with {replicas} devices. Plan for one: `--trainer.devices 1`.")
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
        limits=replace(
            request.limits, host_bytes=host if target.device_kind.has_own_memory else None, disk_bytes=disk_bytes
        ),
        allow=request.allow,
        fixed=fixed,
        adapter=None if "lora" in request.allow else own_adapter(run.callbacks, run.options.precision),
        loader_batch=None if sets_size else loaded,
        own_micro_batch=own_size,
        batching=_batching(run),
        devices=devices,
        strategies=sets_size,
        tolerance=request.tolerance,
        own=own_setting(run, devices.total)[0],
    )


def _counted_in_batches(run: RecipeRun, accumulate: int) -> dict[str, int]:
    """The Trainer's options that count batches, for as many samples as in the recipe; none if nothing changes.

    An optimizer step has as many samples under a plan as without it, so a batch has as many times fewer as more are
    accumulated, on all devices together: for validation as for training, whose loaders share `data.batch_size`.
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
    """Return what the recipe itself chooses, or None and the reason if no records describe it."""
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
    _, size, accumulate = run.sizes(ranks)
    return replace(setting, micro_batch_size=size, accumulate_grad_batches=accumulate, world_size=ranks), ""


def _batching(run: RecipeRun) -> dict[str, Any] | None:
    """The arguments of the recipe's `MicroBatching`, which a plan replaces by its own, as YAML has them."""
    own = run.batching
    if own is None:
        return None
    specs = run.config["trainer"].get("callbacks") or []
    specs = specs if isinstance(specs, list) else [specs]
    written = next((spec.get("init_args") for spec in specs if is_batching(spec["class_path"])), None) or {}
    kind: Any = type(own)
    defaults = defaults_of(kind)
    return {name: value for name, value in written.items() if value != defaults.get(name)}


def _of_own_size(run: RecipeRun) -> RecipeRun:
    """The run with a batch of as many samples as the recipe's data load, whatever number its shapes were given for."""
    said, given = run.data_arguments.get("batch_size"), batch_size(run.batch)
    if not isinstance(said, int) or said == given:
        return run
    note = (
        f"`--batch-shape` has {given} rows and `data.batch_size` is {said}: the plan is for batches of {said} rows. If "
        "yours have others (packed sequences, several views), plan with `--real-batch` instead."
    )
    return replace(run, batch=resize_batch(run.batch, given, said), notes=(*run.notes, note))


def _disk(request: PlanRequest, rates: Rates) -> tuple[Rates, int]:
    """Return rates with the measured speed of a named folder, and the bytes of disk that may be used."""
    offered = request.limits.disk_bytes
    if request.nvme_path is None:
        return rates, offered or 0
    folder = Path(request.nvme_path)
    if not folder.is_dir():
        raise ValueError(f"`--nvme-path {folder}`: there is no such folder. Make it, or name another.")
    free = shutil.disk_usage(folder).free - _DISK_RESERVE
    if free <= 0:
        raise ValueError(f"`--nvme-path {folder}`: the drive is full. Free some of it, or leave the option out.")
    speed = measure_storage(folder, SAMPLE_BYTES)
    both = 2 / (1 / speed.read_bytes_per_s + 1 / speed.write_bytes_per_s)
    return replace(rates, disk_bytes_per_s=both), free if offered is None else min(free, offered)


def _assumed(run: RecipeRun, workload: Workload, plan: Plan, nvme_path: str | None) -> Iterator[str]:
    """Yield the plan's assumptions that nobody has measured."""
    if run.other_rows and not workload.strategies:
        yield f"{run.other_rows}: it stays, only one device is planned for, and nothing goes to disk."
    elif not workload.strategies:
        yield (
            "The data module has no `batch_size` to set, which strategies need: only one device is planned for, and "
            "nothing goes to disk."
        )
    setting = plan.setting
    if setting is not None and workload.kept_size is not None:
        yield f"Micro-batches stay as large as they are: {workload.kept_size}."
    if (
        setting is not None
        and workload.batching is None
        and not workload.is_cut(setting)
        and setting.micro_batch_size != workload.own_micro_batch
    ):
        yield (
            f"Batches have {setting.micro_batch_size} samples instead of {workload.own_micro_batch}, which is the same "
            "where a loss is a mean over samples. With `MicroBatching` in the recipe, a plan cuts its batches instead: "
            "means over tokens are over the whole step, and a loss that compares samples is refused."
        )
    if plan.written_bytes:
        if nvme_path is None:
            rate = format_bytes(round(DISK_BYTES_PER_S))
            yield f"The disk is taken to read and write {rate} per second. Name its folder (`--nvme-path`) to measure."
        yield f"A day of training writes about {format_bytes(plan.written_per_day)} to disk on each machine."
    if plan.setting is not None and plan.setting.world_size > workload.devices.per_machine:
        yield f"The network is taken to carry {format_bytes(round(NETWORK_BYTES_PER_S))} per second and machine."
