"""Say in words what can't be done with weights and gradients of which a rank has a part, as under FSDP2."""

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import DTensor

_INSTEAD = (
    "A penalty of weights alone is exact if the term of each weight is made whole (`term.full_tensor() if "
    "isinstance(term, DTensor) else term`), or leave it to the optimizer's `weight_decay`. In a hook, call `self(...)` "
    "or a whole network of the module, on all ranks. Or train with `strategy=memfit_zero_2` or `memfit_ddp`."
)
_MESSAGES = {
    "got mixed torch.Tensor and DTensor": (
        "{where}computes with {weight} outside of its block, where FSDP2 leaves each rank a part of it. " + _INSTEAD
    ),
    "out of bounds for storage of size 0": (
        "A backward pass goes through weights that FSDP2 has put away since their forward: it differentiates a "
        "gradient (`torch.autograd.grad(..., create_graph=True)`, as a gradient penalty does), or an earlier step. "
        "Train with `strategy=memfit_zero_2` or `memfit_ddp`."
    ),
    "its data is not allocated yet": (
        "{where}makes one tensor of several, of which FSDP2 leaves each rank a part, as Lightning's `grad_norm` does. "
        "A gradient's norm is `p.grad.norm().full_tensor()`, that of all gradients `torch.nn.utils.get_total_norm("
        "[p.grad for p in parameters]).full_tensor()`, on all ranks."
    ),
}
"""What torch says, and what is meant."""


def refuse_divided_loss(loss: Any, module: nn.Module) -> None:
    """Refuse a loss with a term of weights that are divided, in whose backward torch would fail.

    Args:
        loss: Where a backward pass begins.
        module: The module that is trained.

    Raises:
        MisconfigurationException: With the name of a weight.
    """
    if not isinstance(loss, DTensor):
        return
    names = _names(module)
    weight = next((names[id(leaf)] for leaf in _leaves(loss) if id(leaf) in names), None)
    if weight is not None:
        raise MisconfigurationException(
            f"The loss of `training_step` is computed from `{weight}` outside of its block, where FSDP2 leaves each "
            f"rank a part of it. {_INSTEAD}"
        )


def refuse_gradient_hooks(name: str, weight: torch.Tensor, are_parts: bool) -> None:
    """Refuse hooks of a weight that FSDP2 is to divide, or of its parts, that FSDP2 would not call.

    Args:
        name: The weight's name.
        weight: The weight, or its parts.
        are_parts: Whether FSDP2 has divided it.

    Raises:
        MisconfigurationException: If it has one.
    """
    hooks = [*(weight._backward_hooks or {}).values()]
    if not are_parts:  # which keep the other kind, and FSDP2 calls it with their gradients
        hooks += (weight._post_accumulate_grad_hooks or {}).values()
    if not all(map(_only_looks, hooks)):
        raise MisconfigurationException(
            f"`{name}` has a hook of its gradient (`register_hook`, or `register_post_accumulate_grad_hook` before "
            "FSDP2 has divided the module), which FSDP2 would drop: it computes with other parameters. Change "
            "gradients in `on_before_optimizer_step`, where each rank has its parts, register a hook for accumulated "
            "gradients in `on_train_start` (not beside `MicroBatching`, which accumulates them over parts of a batch), "
            "or train with `strategy=memfit_zero_2` or `memfit_ddp`."
        )


def _only_looks(hook: Any) -> bool:
    """Whether a hook is one by which this package watches gradients, which it finds elsewhere under FSDP2."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith(__name__.partition(".")[0] + ".")


def refuse_undivided(optimizers: Iterable[Any], known: Collection[int], module: nn.Module) -> None:
    """Refuse weights that were added when FSDP2 had divided the module: no rank would hear of another's gradients.

    Args:
        optimizers: Those of the run.
        known: What they stepped at its begin, by `id`.
        module: The module.

    Raises:
        MisconfigurationException: With the name of the first one.
    """
    names = {id(one): name for name, one in module.named_parameters()}
    for weight in (one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]):
        if id(weight) not in known and id(weight) in names and not isinstance(weight, DTensor):
            raise MisconfigurationException(
                f"`{names[id(weight)]}` was added after FSDP2 had divided the module, and its gradients would be "
                "averaged over no ranks. Make its layer in `__init__` or `configure_model`, frozen "
                "(`requires_grad_(False)`) for as long as it isn't to be trained."
            )


def put_in_words(error: BaseException, module: nn.Module) -> None:
    """Replace what torch says of parts that meet whole tensors by what is to be done, with the code and the weight.

    Args:
        error: What has ended a run.
        module: The module that was trained.
    """
    text = str(error)
    message = next((words for said, words in _MESSAGES.items() if said in text), None)
    if message is None or not isinstance(error, RuntimeError):
        return
    frames = list(_frames(error))
    users = [frame for frame in frames if not frame.f_globals.get("__name__", "").startswith(("torch.", "lightning"))]
    where = "This run "
    if users:
        code = users[-1].f_code
        where = f"`{code.co_name}` (line {users[-1].f_lineno} of {code.co_filename}) "
    weight = _weight_in(reversed(frames), _names(module))
    error.args = (message.format(where=where, weight=f"`{weight}`" if weight else "a weight"),)


def _names(module: nn.Module) -> dict[int, str]:
    return {id(one): name for name, one in module.named_parameters() if isinstance(one, DTensor)}


def _leaves(loss: torch.Tensor) -> Iterator[Any]:
    """Leaves of a tensor's graph."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield getattr(node, "variable", None)
        waiting += [following for following, _ in node.next_functions]


def _frames(error: BaseException) -> Iterator[FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _weight_in(frames: Iterator[FrameType], names: dict[int, str]) -> str | None:
    """The first divided weight that is a value of some code, or belongs to the layer whose code it is."""
    for frame in frames:
        values = list(frame.f_locals.values())
        layer = frame.f_locals.get("self")
        own = list(layer.parameters(recurse=False)) if isinstance(layer, nn.Module) else []
        for value in (*values, *own):
            if id(value) in names:
                return names[id(value)]
    return None
