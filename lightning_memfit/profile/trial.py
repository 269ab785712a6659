"""What a trial step is run in: `trial` keeps what lies outside of its copy as it is, and `run_copy` runs the copy."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_memfit.profile.budget import Budget
from lightning_memfit.profile.course import Course, RunLength
from lightning_memfit.profile.fingerprint import attached_datamodule
from lightning_memfit.profile.hooks import StartHooks
from lightning_memfit.profile.outside import Outside, kept_outside
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.replaced import replaced
from lightning_memfit.profile.seal import RefusedError, current_seal, sealed
from lightning_memfit.profile.step import OptimizerFactory, StepOptions, kept_random_state, run_step
from lightning_memfit.profile.watched import TensorAccess


@contextmanager
def trial(module: torch.nn.Module, *others: Any) -> Iterator[Outside]:
    """In this context copies are made and run, and change nothing else; of one thread at a time (`one_at_a_time`).

    Args:
        module: The user's module.
        others: Callbacks, which a copy refers to.

    Returns:
        What lies outside of the copy.

    Raises:
        RefusedError: If something was refused, or has changed that can't be put back.
    """
    with kept_random_state(), kept_outside(module, attached_datamodule(module), *others) as outside, sealed():
        yield outside


class ReachedError(RefusedError):
    """A step of a copy has reached the module itself.

    Args:
        name: A parameter that got a gradient.
    """

    def __init__(self, name: str) -> None:
        BaseException.__init__(
            self,
            f"it reaches the module itself, not the copy that is run, so that `{name}` got a gradient. A closure, a "
            "global, a class attribute or a weak reference holds the module or its layers. Reach them by `self`",
        )


def run_copy(
    module: torch.nn.Module,
    clone: torch.nn.Module,
    recorder: EventRecorder,
    batch: Any,
    options: StepOptions,
    techniques: tuple[Any, ...],
    others: tuple[Any, ...],
    make_optimizer: OptimizerFactory | None,
    start_hooks: StartHooks,
    budget: Budget,
    outside: Outside,
    tensors: TensorAccess,
    ranks: Ranks | None = None,
) -> Course:
    """Run steps of a module's copy, which leave the module alone; see `run_step`.

    Args:
        module: The user's module.
        clone: Its copy.
        recorder: Not yet active.
        batch: The copy's own.
        options: Precision, accumulation, clipping.
        techniques: Technique callbacks.
        others: Copies of the user's callbacks.
        make_optimizer: Builds the optimizer for a module that is not a LightningModule.
        start_hooks: Which of the module's hooks at the start of training to call.
        budget: Where the run ends at the latest.
        outside: What lies outside of the copy.
        tensors: Access to one-element tensors, which may be counters.
        ranks: Run the step as one of several ranks.

    Returns:
        The course of the run, with a remark if the step changed attributes of the module itself, which are put back.

    Raises:
        ReachedError: If a parameter of the module gets a gradient: the step has reached it past its copy.
    """
    trained = getattr(getattr(module, "_trainer", None), "lightning_module", None)  # the module may be a copy of it
    originals = [module] if trained is None or trained is module else [module, trained]
    before = [(name, weight, weight.grad) for original in originals for name, weight in original.named_parameters()]
    for _, parameter, _ in before:
        parameter.grad = None  # one that is added to would not show
    attributes = [
        (name, vars(child), dict(vars(child)), _lengths(vars(child)))
        for original in originals
        for name, child in original.named_modules()
    ]
    changed: list[str] = []
    by_others: set[tuple[int, str]] = set()
    try:
        with _noting_others([now for _, now, _, _ in attributes], by_others):
            course = run_step(
                recorder,
                clone,
                batch,
                options,
                techniques,
                make_optimizer,
                datamodule=attached_datamodule(module),
                start_hooks=start_hooks,
                budget=budget,
                length=RunLength.of(module),
                others=others,
                ranks=ranks,
                outside=outside.numbers,
                tensors=tensors,
            )
        reached = [name for name, parameter, _ in before if parameter.grad is not None]
    finally:
        for _, parameter, gradient in before:
            parameter.grad = gradient
        for path, now, then, lengths in attributes:
            found = [key for key in {**now, **then} if now.get(key, _MISSING) is not then.get(key, _MISSING)]
            found += [key for key, length in _lengths(now).items() if lengths.get(key, length) != length]
            found = [key for key in found if (id(now), key) not in by_others]
            changed += [f"`{path}.{key}`" if path else f"`{key}`" for key in dict.fromkeys(found)]
            for key in found:
                now.pop(key, None)
            now.update({key: then[key] for key in found if key in then})
    if reached:
        raise ReachedError(reached[0])
    if changed:
        course.remarks.append(
            f"the step changes {' and '.join(changed[:3])} of the module itself, not of the copy that is run (a "
            "global or a class attribute holds the module): what it keeps there may be too much or too little. "
            "Reach it by `self`"
        )
    return course


@contextmanager
def _noting_others(attributes: list[dict[str, Any]], noted: set[tuple[int, str]]) -> Iterator[None]:
    """Note which attributes of modules are set by threads that are no part of the step.

    Args:
        attributes: Those of each module.
        noted: Gets their `id` and name.
    """
    if threading.active_count() == 1:
        yield
        return
    owned = set(map(id, attributes))
    set_plainly = torch.nn.Module.__setattr__

    def set_and_note(module: torch.nn.Module, name: str, value: Any) -> None:
        if id(vars(module)) in owned and current_seal() is None:
            noted.add((id(vars(module)), name))
        set_plainly(module, name, value)

    with replaced(torch.nn.Module, "__setattr__", set_and_note):
        yield


_MISSING = object()


def _lengths(attributes: dict[str, Any]) -> dict[str, int]:
    return {key: len(value) for key, value in attributes.items() if type(value) in (list, dict, set, deque)}
