"""Behind `memfit plan`: from a recipe to its workload, and from the plan to plain data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_memfit.device.probe import probe_host
from lightning_memfit.estimate.target import Target
from lightning_memfit.memory import parse_bytes
from lightning_memfit.planner.calibration import calibrated
from lightning_memfit.planner.lock import paths_in
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.overlay import overlay_of, technique_classes
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.workload import DEFAULT_ALLOW, Limits, Workload, check_allow, check_trainable, facts_of
from lightning_memfit.profile.build import batch_size
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.base import TechniqueCallback

from .errors import user_mistake
from .estimate_recipe import quiet, target_of
from .recipe_run import RecipeRun, load_recipe


def plan_recipe(arguments: argparse.Namespace, overrides: list[str]) -> tuple[dict[str, Any], list[Path]] | None:
    """Plan for a recipe; None where its step can't be traced, after saying why.

    Returns:
        The plan as plain data with its overlay, and the files and folders that the recipe names.
    """
    with quiet():
        run = load_recipe(overrides)
        workload = workload_of(run, target_of(arguments.device, run), arguments)
        try:
            cache = None if arguments.no_cache else ProfileCache()
            plan = make_plan(workload, cache, overlap=True, verify=arguments.verify)
        except TraceError as error:
            mistake = user_mistake(error)
            if mistake is not None:
                raise mistake from None
            print(f"memfit: cannot tell: {error}", file=sys.stderr)
            return None
    data = plan.to_dict()
    data["overlay"] = overlay_of(plan, run.callback_specs, run.takes_batch_size) if plan.fits else None
    data["notes"] += list(run.notes)
    return data, paths_in(run.config)


def workload_of(run: RecipeRun, target: Target, arguments: argparse.Namespace) -> Workload:
    """What a recipe trains, on a target, within the limits that were named.

    Raises:
        ValueError: If the module can't be planned for, or a limit makes no sense.
    """
    check_trainable(run.module)
    allow = DEFAULT_ALLOW if arguments.allow is None else check_allow(arguments.allow.split(","))
    named = arguments.host_memory
    host = parse_bytes(named, "--host-memory") if named is not None else probe_host().available_bytes
    known = technique_classes()
    fixed = tuple(
        callback
        for callback in run.callbacks
        if isinstance(callback, TechniqueCallback)
        and f"{type(callback).__module__}.{type(callback).__name__}" not in known
    )
    return Workload(
        module=run.module,
        batch=run.batch,
        options=run.options,
        share=batch_size(run.batch) * run.options.accumulate_grad_batches,
        target=target,
        rates=calibrated(rates_of(target)),
        facts=facts_of(run.module, target, run.options),
        limits=Limits(host_bytes=host if target.kind == "cuda" else None),
        allow=allow,
        fixed=fixed,
    )
