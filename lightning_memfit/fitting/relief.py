"""`CheckpointingRelief`: recompute activations when not even one sample fits any more."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_memfit.checkpointing.apply import (
    AppliedCheckpointing,
    CheckpointedForward,
    apply_checkpointing,
    disable_caches,
    is_checkpointed,
)
from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.checkpointing.policies import Choice


class CheckpointingRelief:
    """Have every repeated block of a module recomputed in backward; gradients stay what they are.

    Blocks that keep some of their activations (`ActivationCheckpointing` with `selective` or `choices`) keep none from
    then on. Compiled blocks, those with Hugging Face's own checkpointing and those whose activations are offloaded
    stay as they are.

    Args:
        module: In training.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._applied: AppliedCheckpointing | None = None
        self._before: list[tuple[CheckpointedForward, Choice]] = []
        self._enable_caches: Callable[[], None] | None = None

    def apply(self) -> str | None:
        """Do it, once.

        Returns:
            What was done, in words; None where there is nothing to do.
        """
        plain, partial = self._blocks()
        if self._applied is not None or not (plain or partial):
            return None
        self._enable_caches = disable_caches(self._module)
        self._applied = apply_checkpointing(plain, ["full"] * len(plain))
        self._before = [(forward, forward.choice) for forward in partial]
        for forward in partial:
            forward.choice = "full"
        return f"the activations of {len(plain) + len(partial)} more blocks are recomputed in backward from now on"

    def remove(self) -> None:
        """Have blocks keep what they kept before. Safe to call twice."""
        if self._applied is not None:
            self._applied.remove()
        for forward, choice in self._before:
            forward.choice = choice
        if self._enable_caches is not None:
            self._enable_caches()
        self._applied, self._before, self._enable_caches = None, [], None

    def _blocks(self) -> tuple[list[nn.Module], list[CheckpointedForward]]:
        """Blocks that keep everything, and the forwards of those that keep a part."""
        plain: list[nn.Module] = []
        partial: list[CheckpointedForward] = []
        for block in (module for group in find_blocks(self._module) for module in group.modules):
            forward = vars(block).get("forward")
            if isinstance(forward, CheckpointedForward) and forward.choice != "full":
                partial.append(forward)
            elif not (is_checkpointed(block) or _is_compiled(block)):
                plain.append(block)
        return plain, partial


def _is_compiled(block: nn.Module) -> bool:
    return any(getattr(child, "_compiled_call_impl", None) is not None for child in block.modules())
