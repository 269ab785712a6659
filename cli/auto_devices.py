"""`memfit: auto` with several devices: plan as `memfit plan` does, strategies included, and lay it over the recipe."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAN_VARIABLE = "MEMFIT_AUTO_PLAN"
"""Names the plan's file for the processes that a strategy starts, so that all of them train by one plan."""

_STARTED_BY_OTHERS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "NODE_RANK", "GROUP_RANK")


def num_devices(trainer: Any) -> int:
    """Devices of all machines that a trainer's configuration asks for."""
    on_cuda = str(trainer.accelerator) in ("auto", "gpu", "cuda")
    if on_cuda and str(trainer.devices) in ("auto", "-1"):
        import torch

        return max(1, torch.cuda.device_count()) * int(trainer.num_nodes)
    from .recipe_run import num_processes

    return num_processes(trainer.devices) * int(trainer.num_nodes)


def plan_file(arguments: Sequence[str], num_nodes: int = 1) -> Path:
    """The plan of a `fit` for several devices: made here, or by the process that started this one.

    Args:
        arguments: Behind `fit`.
        num_nodes: Machines.

    Raises:
        ValueError: If nothing fits, or processes are started by others, each of which would plan by itself.
    """
    known = os.environ.get(PLAN_VARIABLE)
    if known:
        return Path(known)
    if num_nodes > 1 or any(name in os.environ for name in _STARTED_BY_OTHERS):
        raise ValueError(
            "`memfit: auto` plans in one process, which starts the others. With several machines, torchrun or SLURM "
            "make the plan first (`memfit plan --config RECIPE --device '2x NAME' --out plan.yaml`), then train with "
            "`memfit fit --config RECIPE --config plan.yaml`."
        )
    return _made(list(arguments))


def _made(arguments: list[str]) -> Path:
    from .estimate import split_arguments
    from .plan import make_parser, write_overlay
    from .plan_recipe import plan_recipe

    of_fit_alone = argparse.ArgumentParser()
    of_fit_alone.add_argument("--ckpt-path")
    of_fit_alone.add_argument("--memfit")
    _, of_recipe = split_arguments(of_fit_alone, arguments)
    made = plan_recipe(make_parser().parse_args([]), of_recipe)
    if made is None:
        raise ValueError("`memfit: auto`: without a trace there is no plan. Choose techniques yourself: `memfit: off`.")
    plan, _ = made
    if not plan["fits"]:
        raise ValueError(f"`memfit: auto`: {plan['summary']} {' '.join(plan['advice'][1:])}".rstrip())
    folder = tempfile.TemporaryDirectory(prefix="memfit-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "plan.yaml"
    write_overlay(path, plan)
    os.environ[PLAN_VARIABLE] = str(path)
    print(f"memfit: auto: {plan['summary']}", file=sys.stderr)
    return path
