"""What a plan was made for: written into its file by `memfit plan`, compared where that file is laid over a recipe.

A plan's file changes batch size, precision, strategy and callbacks of a recipe. Over a recipe that was edited since, or
another module, it would change training without a word, so that it names what it was made for, and is refused
elsewhere. Its callbacks replace those of the recipe's techniques and leave all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from lightning_memfit.planner.plan import is_planned

_RELEVANT = (
    "precision",
    "strategy",
    "devices",
    "num_nodes",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "sync_batchnorm",
    "plugins",
    "callbacks",
)
"""Arguments of the Trainer that change what a step computes or needs; how long it trains, what it logs may differ."""

COUNT_BATCHES = ("limit_train_batches", "limit_val_batches", "overfit_batches", "val_check_interval")
"""Arguments of the Trainer that, as whole numbers, count batches: a plan with batches of another size changes them."""

_WATCHERS = frozenset(
    {
        *("EarlyStopping", "ModelCheckpoint", "OnExceptionCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor"),
        *("ModelSummary", "RichModelSummary", "RichProgressBar", "TQDMProgressBar", "Timer"),
        *("MemoryMonitor", "MemoryPrediction", "MemoryLimit", "OutOfMemoryReport", "RunSummary", "RunTimeline"),
        *("FlopsMonitor", "DataWaitMonitor", "NonFiniteGuard", "Preemption", "WholeSteps"),
    }
)
"""Callbacks without a part in what a plan decides, so that they may come and go."""

_LOADING = frozenset({"num_workers", "tokenize_workers", "pin_memory", "persistent_workers", "prefetch_factor"})
"""Arguments of data modules that change how fast batches come, and nothing about them."""


def made_for(config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return what a plan names itself as made for."""
    return {"device": device, "recipe": written(config)}


def written(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recipe says about model, data and a step, by keys such as `data.batch_size`."""
    trainer = {name: config["trainer"].get(name) for name in (*_RELEVANT, *COUNT_BATCHES)}
    kept = {"model": config.get("model"), "data": config.get("data"), "trainer": trainer}
    return {key: value for key, value in _flat(kept, "") if key.rpartition(".")[2] not in _LOADING}


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield every value below one that is set, classes by their names instead of their places in a list."""
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield key, value["class_path"]
        for name, item in value.items():
            if name == "init_args":
                yield from _flat(item, key)
            elif name != "class_path":
                yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(map(_class_name, value)):
        seen = Counter[str]()
        for item in value:
            name = _class_name(item)
            seen[name] += 1
            if name not in _WATCHERS:
                yield from _flat(item, f"{key}.{name}" + (f"[{seen[name]}]" if seen[name] > 1 else ""))
    elif value is not None:
        yield key, value


def _class_name(spec: Any) -> str:
    """Return the name of the class that a part of a configuration stands for; empty if it is none."""
    return str(spec.get("class_path", "")).rpartition(".")[2] if isinstance(spec, Mapping) else ""


def differences(stamp: Mapping[str, Any], now: Mapping[str, Any], recounted: Collection[str] = ()) -> list[str]:
    """Return what is not as it was when a plan was made, in words."""
    then = stamp.get("recipe")
    found = []
    if isinstance(then, Mapping):
        free = {f"trainer.{name}" for name in COUNT_BATCHES if name not in recounted}
        keys = (key for key in sorted({*then, *now} - free) if then.get(key) != now.get(key))
        found += [f"`{key}` was {_shown(then, key)} and is {_shown(now, key)}" for key in keys]
    return found


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not set"
    text = repr(values[key])
    return text if len(text) <= 60 else f"{text[:57]}..."


def laid_over(planned: Sequence[Namespace], recipe: Sequence[Namespace], plan_file: str) -> list[Namespace]:
    """Return the callbacks of a run by a plan: the plan's, and the recipe's without techniques."""
    own = list(planned)
    for spec in recipe:
        if spec not in own:
            raise ValueError(
                f"a `--config` after `{plan_file}` replaces the list `callbacks`, and the plan's with it. Put the "
                "plan's file last, or write `callbacks+`."
            )
        own.remove(spec)
    return [*own, *(spec for spec in recipe if not is_planned(spec.class_path))]
