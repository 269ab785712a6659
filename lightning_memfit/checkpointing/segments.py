"""Checkpoint segments of about sqrt(n) blocks of an nn.Sequential (Chen et al., 2016, arXiv 1604.06174).

With blocks whose inputs are small beside what they keep inside, as in transformers, checkpointing each block by itself
needs less memory. Segments pay where blocks are thin.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memfit.checkpointing.apply import AppliedCheckpointing, CheckpointedForward, refuse_checkpointed
from lightning_memfit.checkpointing.blocks import BlockGroup


class SegmentedForward(CheckpointedForward):
    """Stands in for the `forward` of an nn.Sequential and keeps only the inputs of its segments."""

    def __init__(self, container: nn.Sequential) -> None:
        super().__init__(container, "full")
        self.segment_size = math.ceil(math.sqrt(len(container)))

    def __call__(self, value: Any) -> Any:
        """Run segment after segment."""
        if not torch.is_grad_enabled():
            return self.inner(value)
        children = list(self.block.children())
        for start in range(0, len(children), self.segment_size):
            value = self.run(partial(_run, children[start : start + self.segment_size]), value)
        return value


def apply_segments(module: nn.Module, groups: Sequence[BlockGroup]) -> AppliedCheckpointing:
    """Checkpoint the containers of some groups in segments of ceil(sqrt(n)) of their n children.

    Raises:
        ValueError: If a container is no plain nn.Sequential, since then its blocks are called by code that cannot be
            cut.
    """
    containers = [_container(module, group) for group in groups]
    for container in containers:
        refuse_checkpointed(container)
    forwards = [SegmentedForward(container) for container in containers]
    for wrapper in forwards:
        wrapper.block.forward = wrapper
    return AppliedCheckpointing(forwards)


def _container(module: nn.Module, group: BlockGroup) -> nn.Sequential:
    container = dict(module.named_modules()).get(group.container)
    if not isinstance(container, nn.Sequential) or type(container).forward is not nn.Sequential.forward:
        raise ValueError(
            f"`mode='sqrt'`: the blocks {group.names[0]!r} ... are called one by one by code of "
            f"{type(container).__name__}, not by a plain nn.Sequential, so that they cannot be joined into segments. "
            "Use mode='full', which for blocks with much inside needs less memory anyway."
        )
    return container


def _run(children: list[nn.Module], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
