"""Hooks of weights, where a batch is run in micro-batches.

`HooksOfBatch` calls those of `register_hook`, which get and may change the gradient of a backward pass, once for the
batch: what a clamp makes of the parts is not what it makes of the whole.

A backward pass calls `register_post_accumulate_grad_hook` on the sum so far: with micro-batches that is not the batch's
gradient until the last of them, and what a hook has done to the sum of the first is done to them again. So
`refusing_early_changes` lets them look only.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

_CHANGED_EARLY = (
    "{} has a hook for accumulated gradients (`register_post_accumulate_grad_hook`) that changes them, and the batch "
    "is split: the hook would run once per micro-batch, on gradients that are not those of the batch yet. Change them "
    "in `on_before_optimizer_step`, which is called when they are complete, or keep the whole share in one micro-batch."
)


_NOTES = -1
"""Key of a hook that notes the order of weights; torch counts those of others up from 0."""


class HooksOfBatch:
    """Calls the hooks of weights (`register_hook`) once, with the gradient of all micro-batches of a batch.

    Args:
        weights: The weights; each may come more than once. FSDP2 calls no such hooks of what it divides.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        found = {id(one): one for one in weights if one._backward_hooks and not isinstance(one, DTensor)}
        self._hooked: list[tuple[Tensor, Any]] = [(one, one._backward_hooks) for one in found.values()]
        self._before: list[Tensor | None] | None = None
        self._order: dict[int, None] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run backward passes that don't call them, and note the order in which these come to the weights."""
        taken = [(hooks, list(hooks.items())) for _, hooks in self._hooked]
        for index, (hooks, _) in enumerate(taken):
            hooks.clear()
            hooks[_NOTES] = partial(self._note, index)
        try:
            yield
        finally:
            for hooks, items in taken:
                hooks.pop(_NOTES, None)
                hooks.update([*items, *hooks.items()])

    def _note(self, index: int, gradient: Tensor) -> None:
        self._order.setdefault(index)

    def begin(self) -> None:
        """Put aside the gradients of what came before the batch, once those are cleared that are to be."""
        if self._before is None:
            self._before = [weight.grad for weight, _ in self._hooked]
            for weight, _ in self._hooked:
                weight.grad = None

    @torch.no_grad()
    def finish(self, factor: float = 1.0) -> None:
        """Call them, and add what they make of the gradients to what was put aside.

        In the order of a backward pass, in which they may draw random numbers.

        Args:
            factor: What gradients are multiplied with for them: they are parts of those of a window and of all ranks.
        """
        gradients = [weight.grad for weight, _ in self._hooked]
        self.give_up()
        for index in self._order:
            (weight, hooks), gradient = self._hooked[index], gradients[index]
            if gradient is None:
                continue
            if factor != 1.0:
                gradient = gradient * factor
            for hook in list(hooks.values()):
                changed = hook(gradient)
                if changed is not None:
                    gradient = changed.clone()  # which a hook may keep
            if factor != 1.0:
                gradient = gradient / factor
            if weight.grad is None:
                weight.grad = gradient
            elif gradient.layout is weight.grad.layout is torch.strided:
                weight.grad.add_(gradient)
            else:
                weight.grad = weight.grad + gradient

    def give_up(self) -> None:
        """Put the gradients back that came before the batch."""
        before, self._before = self._before or [], None
        for (weight, _), gradient in zip(self._hooked, before, strict=False):
            weight.grad = gradient


@contextmanager
def refusing_early_changes(module: nn.Module, weights: Iterable[Tensor]) -> Iterator[None]:
    """Refuse hooks that change gradients in a backward pass of one micro-batch of several.

    Args:
        module: The module in training, which knows the names of its weights.
        weights: Weights, or the parts of them that are stepped; each may come more than once.

    Raises:
        MisconfigurationException: When a hook changes a weight or its gradient; those that only look are called.
    """
    hooked: dict[int, Tensor] = {id(one): one for one in weights if one._post_accumulate_grad_hooks}
    watched = [
        (weight._post_accumulate_grad_hooks, key, hook, _Watched(hook, module))
        for weight in hooked.values()
        for key, hook in (weight._post_accumulate_grad_hooks or {}).items()
        if not str(getattr(hook, "__module__", "")).startswith("deepspeed.")  # which takes gradients by them
    ]
    for hooks, key, _, ours in watched:
        hooks[key] = ours
    try:
        yield
    finally:
        for hooks, key, hook, ours in watched:
            if hooks.get(key) is ours:  # the hook may have removed itself
                hooks[key] = hook


class _Watched:
    """A hook that is refused if it changes what it is called with."""

    def __init__(self, hook: Any, module: nn.Module) -> None:
        self._hook, self._module = hook, module

    def __call__(self, weight: Tensor) -> Any:
        before = weight.grad
        with _Writes((weight, before)) as writes:
            result = self._hook(weight)
        if weight.grad is not before or writes.found:
            names = (f"`{name}`" for name, one in self._module.named_parameters() if one is weight)
            raise MisconfigurationException(
                _CHANGED_EARLY.format(next(names, f"A weight of shape {tuple(weight.shape)}"))
            )
        return result


class _Writes(TorchDispatchMode):
    """Notices operations that write into the storages of some tensors, through whichever view of them.

    Args:
        tensors: The tensors; None among them stands for none.

    Attributes:
        found: Whether there was one.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {key for one in tensors if one is not None for key in _storages(one)}
        self.found = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable and not self.found:
            given = zip(schema.arguments, args, strict=False)
            named = ((one, kwargs[one.name]) for one in schema.arguments if one.name in kwargs)
            for argument, value in (*given, *named):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = (key for one in tree_leaves(value) if isinstance(one, Tensor) for key in _storages(one))
                    self.found = self.found or not self._storages.isdisjoint(written)
        return func(*args, **kwargs)


def _storages(tensor: Tensor) -> list[int]:
    """Identities of the storages in which a tensor's values lie."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.layout == torch.sparse_coo:
        return [_storage(part) for part in (tensor._indices(), tensor._values())]
    return [_storage(tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
