"""Replace an optimizer that schedulers and user code already refer to."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

Convert = Callable[[Optimizer], Optimizer]


def replace_optimizers(configured: Any, convert: Convert) -> Any:
    """Convert every optimizer in what `configure_optimizers` returned and re-attach the schedulers.

    The result has the form of the input, which may be any that Lightning accepts. Schedulers (including SequentialLR,
    ChainedScheduler and others that hold schedulers) continue with their learning rates and counters. A replaced
    optimizer refuses to step, so that a reference kept elsewhere cannot be used unnoticed.

    Args:
        configured: An optimizer, a scheduler, or lists, tuples and dicts of them; anything else is passed through.
        convert: Called once per optimizer; returns one with the same number of groups in the same order.
    """
    replaced = {id(old): (old, convert(old)) for old in _unique(_find(configured, Optimizer))}
    for scheduler in _unique(_schedulers(configured)):
        _reattach(scheduler, replaced)
    for old, new in replaced.values():
        if new is not old:
            _retire(old, new)
    return _substitute(configured, replaced)


def _substitute(value: Any, replaced: dict[int, tuple[Optimizer, Optimizer]]) -> Any:
    if isinstance(value, Optimizer):
        return replaced[id(value)][1]
    if isinstance(value, dict):
        return {key: _substitute(item, replaced) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_substitute(item, replaced) for item in value)
    return value


def _find(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find(item, kind)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _find(item, kind)


def _schedulers(configured: Any) -> Iterator[Any]:
    """Objects that have an attribute `optimizer`, and the schedulers they are composed of."""
    for value in _leaves(configured):
        if isinstance(getattr(value, "optimizer", None), Optimizer):
            yield value
            for attribute in vars(value).values():
                yield from _schedulers(attribute)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _unique(values: Iterator[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _reattach(scheduler: Any, replaced: dict[int, tuple[Optimizer, Optimizer]]) -> None:
    if id(scheduler.optimizer) not in replaced:
        return  # Lightning itself reports schedulers of optimizers that were not returned
    old, new = replaced[id(scheduler.optimizer)]
    if new is old:
        return
    _watch_steps(new)
    scheduler.optimizer = new
    # OneCycleLR and CyclicLR write either `momentum` or the first of `betas` into the groups.
    if getattr(scheduler, "cycle_momentum", False) and "momentum" in old.defaults and "momentum" not in new.defaults:
        scheduler.use_beta1 = True


class _KeepLearningRate(LRScheduler):
    """Changes no learning rate; constructing a scheduler is torch's public way to watch an optimizer's steps."""

    @override
    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _watch_steps(optimizer: Optimizer) -> None:
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        _KeepLearningRate(optimizer)


def _retire(old: Optimizer, new: Optimizer) -> None:
    names = type(old).__name__, type(new).__name__  # names only: the closure would keep the optimizers alive

    def step(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"This {names[0]} was replaced by {names[1]}. Use the one that `self.optimizers()` "
            "returns instead of a reference made in `configure_optimizers`."
        )

    old.step = step  # type: ignore[method-assign]
