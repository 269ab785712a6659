"""What a plan was made for: written into its file by `memfit plan`, compared where that file is laid over a recipe.

A plan's file changes batch size, precision, strategy and callbacks of a recipe. Over a recipe that was edited since, or
another module, it would change training without a word, so that it names what it was made for, and is refused
elsewhere. Its callbacks replace those of the recipe's techniques and leave all others.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from jsonargparse import Namespace
from torch.nn.parameter import is_lazy

from lightning_memfit.device.catalogue import find_device
from lightning_memfit.planner.lock import Sources, source_of
from lightning_memfit.planner.plan import is_planned
from lightning_memfit.profile.trace import TraceError, of_built

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


def made_for(config: Namespace, device: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a plan names itself as made for.

    Args:
        config: The recipe as parsed, nothing instantiated.
        device: Name of the device.
        parameters: `parameters_of` the model.
    """
    modules = dict(Sources.now().modules)
    return {"device": device, "recipe": written(config), "modules": modules, "parameters": parameters}


def parameters_of(model: torch.nn.Module) -> dict[str, Any] | None:
    """Return the number of a model's parameters, and a digest of their names and shapes; None if they can't be told.

    The recipe and the source don't tell them where the model reads a file or the environment. Types aren't among them,
    as pretrained weights bring their own, and a plan is made without these.

    A model that builds itself (`configure_model`) is built in a copy without memory, where a plan is made and in a run
    alike: what a run builds has other shapes and names under a strategy that divides it, and under techniques.

    Args:
        model: What was instantiated, before its `setup`, which has data only in a run.
    """
    try:
        return of_built(model, _parameters_of)
    except TraceError:
        return None


def _parameters_of(built: torch.nn.Module) -> dict[str, Any]:
    known = [(name, one) for name, one in built.named_parameters(remove_duplicate=False) if not is_lazy(one)]
    table = [(name, list(one.shape)) for name, one in known]
    return {
        "number": sum(one.numel() for one in {id(one): one for _, one in known}.values()),
        "digest": hashlib.sha256(json.dumps(table).encode()).hexdigest()[:24],
    }


def other_parameters(stamp: Mapping[str, Any], model: torch.nn.Module) -> tuple[str, str] | None:
    """Return how a model differs from the one that a plan was made for and what to do, in words; None if it doesn't.

    Args:
        stamp: `made_for` of the plan's file.
        model: What was instantiated, before its `setup`.
    """
    then = stamp.get("parameters")
    if not isinstance(then, Mapping):
        return None
    now = parameters_of(model)
    if now is None or then == now:
        return None
    number = then.get("number")
    if not isinstance(number, int) or number == now["number"]:
        return f"parameters of `model` have other names or shapes{_BY_WHAT}", PLAN_AGAIN
    found = f"`model` had {number:,} parameters and has {now['number']:,}"
    if then.get("digest") != now["digest"]:
        return f"{found}{_BY_WHAT}", PLAN_AGAIN
    return (
        f"{found}, as other ones of them are shared (tied weights)",
        "If planning again (`memfit plan`) finds the same number as before, the pretrained weights untie them, which a "
        "plan doesn't read: say so in the model's configuration (`tie_word_embeddings: false`), then plan again.",
    )


def written(config: Namespace) -> dict[str, Any]:
    """Return what a recipe says about model, data and a step, by keys such as `data.batch_size`."""
    trainer = {name: value for name, value in vars(config.trainer).items() if name in (*_RELEVANT, *COUNT_BATCHES)}
    kept = {"model": config.get("model"), "data": config.get("data"), "trainer": trainer}
    return {key: value for key, value in _flat(kept, "") if key.rpartition(".")[2] not in _LOADING}


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield every value below one that is set, classes by their names instead of their places in a list."""
    value = vars(value) if isinstance(value, Namespace) else value
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield key, value["class_path"]
        for name, item in value.items():
            if name == "init_args":
                yield from _flat(item, key)
            elif name != "class_path":
                yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)) and any(_class_name(item) for item in value):
        seen = Counter[str]()
        for item in value:
            name = _class_name(item)
            seen[name] += 1
            if name not in _WATCHERS:
                yield from _flat(item, f"{key}.{name}" + (f"[{seen[name]}]" if seen[name] > 1 else ""))
    elif value is not None:
        yield key, _plain(value)


def _plain(value: Any) -> Any:
    """Return a value as YAML has it."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value) and hasattr(value, "__qualname__"):  # whose text has an address
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _class_name(spec: Any) -> str:
    """Return the name of the class that a part of a configuration stands for; empty if it is none."""
    path = spec.get("class_path") if isinstance(spec, (Namespace, Mapping)) else None
    return str(path).rpartition(".")[2] if isinstance(path, str) else ""


PLAN_AGAIN = "Plan again (`memfit plan`)."
"""What to do where a plan was made for something else."""

_BY_WHAT = ", by a file or variable that it reads"


def differences(stamp: Mapping[str, Any], now: Mapping[str, Any], recounted: Collection[str] = ()) -> list[str]:
    """Return what is not as it was when a plan was made, in words.

    Args:
        stamp: `made_for` of the plan's file.
        now: `written` of the recipe under the plan.
        recounted: Those of `COUNT_BATCHES` that the run has from the plan; others may have changed.
    """
    then = stamp.get("recipe")
    found = []
    if isinstance(then, Mapping):
        free = {f"trainer.{name}" for name in COUNT_BATCHES if name not in recounted}
        keys = (key for key in sorted({*then, *now} - free) if then.get(key) != now.get(key))
        found += [f"`{key}` was {_shown(then, key)} and is {_shown(now, key)}" for key in keys]
    modules = stamp.get("modules")
    if isinstance(modules, Mapping):
        # One that isn't found here is either not needed, or ends the run by itself.
        here = {name: digest for name, digest in modules.items() if source_of(name) is not None}
        found += [f"the module `{name}` is another" for name in Sources(modules=here).changed()]
    return found


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not set"
    text = repr(values[key])
    return text if len(text) <= 60 else f"{text[:57]}..."


def laid_over(planned: Sequence[Namespace], recipe: Sequence[Namespace], plan_file: str) -> list[Namespace]:
    """Return the callbacks of a run by a plan: the plan's, and the recipe's without techniques.

    Args:
        planned: Callbacks of the recipe with the plan's appended somewhere.
        recipe: Callbacks of the recipe without the plan.
        plan_file: For messages.

    Raises:
        ValueError: If a file after the plan's has replaced its callbacks.
    """
    own = list(planned)
    for spec in recipe:
        if spec not in own:
            raise ValueError(
                f"a `--config` after `{plan_file}` replaces the list `callbacks`, and the plan's with it. Put the "
                "plan's file last, or write `callbacks+`."
            )
        own.remove(spec)
    return [*own, *(spec for spec in recipe if not is_planned(spec.class_path))]


def other_device(planned: str, here: str) -> bool:
    """Whether a plan names a device of the catalogue, and a run is on another; a size is no name.

    Args:
        planned: As the catalogue or a driver names it: plans without `--device` have the driver's name.
        here: As `device_name` has it, which is the driver's where that stands for none or several of the catalogue.
    """
    try:
        spec = find_device(planned)
    except ValueError:
        return False
    try:
        return bool(spec.flops) and find_device(here).name != spec.name
    except ValueError:
        return bool(spec.flops) and not spec.may_be(here)
