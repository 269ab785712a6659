"""A plan as YAML that is laid over its recipe: `fit --config recipe.yaml --config plan.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_memfit.planner.plan import Plan
from lightning_memfit.techniques.registry import TECHNIQUES

_OWN = "lightning_memfit"
FEEDBACK = "lightning_memfit.planner.feedback.PlanFeedback"
BATCHING = "lightning_memfit.fitting.callback.MicroBatching"


def overlay_of(
    plan: Plan, callbacks: Sequence[dict[str, Any]], batch_size_in_data: bool, nvme_path: str | None = None
) -> dict[str, Any]:
    """What the plan says, in the recipe's words.

    Every callback of the recipe that isn't a technique stays; lists replace each other in YAML, so they are repeated.
    Micro-batches are the loader's where the data module takes a `batch_size`; else `MicroBatching` cuts them.

    Args:
        plan: That fits.
        callbacks: Of the recipe, each with `class_path` and maybe `init_args`.
        batch_size_in_data: Whether `data` has an argument `batch_size`.
        nvme_path: Folder for what goes to disk; by default the strategy asks the environment.

    Raises:
        ValueError: If the plan doesn't fit.
    """
    if plan.setting is None:
        raise ValueError("Nothing fits, so there is no plan to write.")
    setting = plan.setting
    laid = setting.without_sizes().overlay().get("trainer", {})
    chosen = laid.pop("callbacks+", [])
    kept = [spec for spec in callbacks if not is_technique(spec["class_path"])]
    alone = {"strategy": "auto", "devices": 1, "num_nodes": 1}  # where the recipe says otherwise
    trainer: dict[str, Any] = {"precision": setting.precision, **alone, **laid}
    if setting.sharding is not None and setting.sharding.on_disk:
        trainer["strategy"]["init_args"] = {**trainer["strategy"]["init_args"], "nvme_path": nvme_path}
    if batch_size_in_data:
        trainer["accumulate_grad_batches"] = setting.accumulate_grad_batches
    elif setting.accumulate_grad_batches > 1:
        chosen = [*chosen, {"class_path": BATCHING, "init_args": {"micro_batch_size": setting.micro_batch_size}}]
        trainer["accumulate_grad_batches"] = 1
    told = {"seconds": dict(plan.uncorrected), "rates": plan.rates, "peak_bytes": plan.peak_bytes}
    kept = [spec for spec in kept if spec["class_path"] != FEEDBACK]
    trainer["callbacks"] = [*chosen, *kept, {"class_path": FEEDBACK, "init_args": told}]
    data = {"data": {"init_args": {"batch_size": setting.micro_batch_size}}} if batch_size_in_data else {}
    return {**data, "trainer": trainer}


def technique_classes() -> frozenset[str]:
    """Import paths of all callbacks that techniques put into a run."""
    return frozenset(spec.class_path for technique in TECHNIQUES for spec in technique.callbacks)


def is_technique(class_path: str) -> bool:
    """Whether a callback, by its full path or as `lightning_memfit.NAME`, is one that techniques put into a run."""
    package, _, name = class_path.rpartition(".")
    return package.split(".")[0] == _OWN and name in {path.rpartition(".")[2] for path in technique_classes()}
