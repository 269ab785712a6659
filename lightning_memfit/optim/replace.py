"""Replace an optimizer that schedulers, hooks and user code already refer to, or take parameters out of it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim.steps import OwnHook, refuse_own_step

Convert = Callable[[Optimizer], Optimizer]


def replace_optimizers(configured: Any, convert: Convert) -> Any:
    """Convert every optimizer in what `configure_optimizers` returned, and return that.

    The objects stay the ones that the module made, and become what `convert` returns: a reference that the module
    keeps, its parameter groups (the list and the dicts), its hooks and its schedulers are those of the new optimizer.
    """
    replacements = [(optimizer, convert(optimizer)) for optimizer in optimizers_in(configured)]
    changed = [(optimizer, replacement) for optimizer, replacement in replacements if replacement is not optimizer]
    for optimizer, _ in changed:
        refuse_own_step(optimizer, "which its replacement would not run")
    for optimizer, replacement in changed:
        is_tracked = "step" in vars(optimizer)  # by schedulers, for which torch puts a layer on the object
        _become(optimizer, replacement)
        if is_tracked:
            _KeepLearningRate(optimizer)
    return configured


def optimizers_in(configured: Any) -> list[Optimizer]:
    """The optimizers in what `configure_optimizers` returned, each once."""
    return list(dict.fromkeys(leaf for leaf in tree_leaves(configured) if isinstance(leaf, Optimizer)))


def convert_configured(module: Any, convert: Convert) -> Callable[[], None]:
    """Convert what a module's `configure_optimizers` will return; the function that is returned takes this back."""
    return wrap_method(module, "configure_optimizers", lambda inner: replace_optimizers(inner(), convert))


def take_out(optimizer: Optimizer, leaves: Callable[[Tensor], bool]) -> None:
    """Take parameters out of an optimizer that has not stepped yet, in place, with their names and states."""
    for group in optimizer.param_groups:
        kept = [place for place, p in enumerate(group["params"]) if not leaves(p)]
        for parameter in filter(leaves, group["params"]):
            optimizer.state.pop(parameter, None)  # Adagrad makes them when it is constructed
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][place] for place in kept]


def _become(optimizer: Optimizer, replacement: Optimizer) -> None:
    """Exchange class and attributes of two optimizers, so that the first is what the second was.

    The groups stay the same list of the same dicts, as modules keep references to these too.
    """
    old, new = vars(optimizer), vars(replacement)
    before, after = dict(old), dict(new)
    wraps = after.get("wrapped") is optimizer
    before.pop("step", None)  # a scheduler's layer around the old class's step; it gets a new one below
    after.pop("step", None)
    for name in (name for name in before if name.endswith("_hooks")):
        # The same dicts: whoever registered a hook removes it from the one it was put into.
        for key in [key for key, hook in before[name].items() if OwnHook.is_one(hook) and not wraps]:
            del before[name][key]
        before[name].update(after.get(name) or {})
        after[name] = before[name]
    if wraps:
        after["wrapped"] = replacement
    else:
        for group, values in zip(before["param_groups"], after["param_groups"], strict=True):
            values = dict(values)  # of which the group may be the same object
            group.clear()
            group.update(values)
        after["param_groups"] = before["param_groups"]
        # What users have put on the object, but not what the old class says of itself: fused optimizers of torch
        # unscale gradients, and GradScaler asks a private attribute whether this one does. Schedulers warn without one.
        theirs = {name: value for name, value in before.items() if name == "_opt_called" or not name.startswith("_")}
        after = {**theirs, **after}
    optimizer.__class__, replacement.__class__ = type(replacement), type(optimizer)
    for attributes, values in ((old, after), (new, before)):
        attributes.clear()
        attributes.update(values)


class _KeepLearningRate(LRScheduler):
    """Changes no learning rate; constructing a scheduler is torch's public way to watch an optimizer's steps."""

    @override
    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]
