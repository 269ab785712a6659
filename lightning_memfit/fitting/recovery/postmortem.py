"""Explain what filled the memory when not even one sample fits."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.ledger import state_tensors

_NUM_NAMED = 5
_NUMBER = re.compile(r"\b\d+\b")


@contextmanager
def _kept_for_backward(module: nn.Module) -> Iterator[dict[int, tuple[int, str]]]:
    """Record bytes and description of the tensors that forward passes keep for backward, by storage."""
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, tuple[int, str]] = {}
    owners: list[str] = []
    handles = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, name=name: owners.append(name)))
        handles.append(child.register_forward_hook(lambda *_: owners.pop() and None, always_call=True))

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            owner = owners[-1] if owners else ""
            text = f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]} kept for backward by `{owner or 'training_step'}`"
            kept.setdefault(storage.data_ptr(), (storage.nbytes(), text))
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        for handle in handles:
            handle.remove()


def explain(module: nn.Module, optimizers: list[Optimizer], run: Callable[[], Any], hint: str = "") -> str:
    """Run the failing micro-batch once more and name the largest tensors alive when it fails.

    Args:
        module: The module in training.
        optimizers: Its optimizers.
        run: Runs the micro-batch; its error is expected.
        hint: What would help.
    """
    kept_until = "by the whole micro-batch"
    with _kept_for_backward(module) as tensors:
        try:
            run()
        except Exception:
            kept_until = "until the error"
    found = list(tensors.values())
    for name, parameter in module.named_parameters():
        found.append((parameter.nbytes, f"{tuple(parameter.shape)} parameter `{name}`"))
        if parameter.grad is not None:
            found.append((parameter.grad.nbytes, f"{tuple(parameter.shape)} gradient of `{name}`"))
    states = sum(value.nbytes for optimizer in optimizers for _, value in state_tensors(optimizer))
    weights = sum(parameter.nbytes for parameter in module.parameters())
    kept = sum(size for size, _ in tensors.values())
    summary = f"Parameters {format_bytes(weights)}, optimizer states {format_bytes(states)}"
    if kept:
        summary += f", kept for backward {kept_until} {format_bytes(kept)}"
    lines = [hint] if hint else []  # first, for who shows no more than the beginning
    lines.append(f"{summary}. The largest tensors:")
    lines += [f"  {format_bytes(size)}  {text}" for size, text in _largest(found)]
    return "\n".join(lines)


def _largest(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return bytes and description of the largest; equal ones of numbered modules, such as blocks, are grouped."""
    alike: dict[str, list[tuple[int, str]]] = {}
    for size, text in found:
        what, mark, owner = text.partition("`")
        alike.setdefault(what + mark + _NUMBER.sub("*", owner), []).append((size, text))
    together = [
        (sum(size for size, _ in members), f"{len(members)} x {text}" if len(members) > 1 else members[0][1])
        for text, members in alike.items()
    ]
    return sorted(together, reverse=True)[:_NUM_NAMED]
