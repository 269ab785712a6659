"""`Recomputation`: what is done when not even one sample fits, in the middle of training."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn

from lightning_memfit.reliability.consensus import RankConsensus

if TYPE_CHECKING:
    from lightning_memfit.checkpointing.apply import AppliedCheckpointing, CheckpointedForward
    from lightning_memfit.checkpointing.policies import Choice

LastResort = Literal["none", "recompute"]
"""What follows when one sample doesn't fit: an error, or recomputation."""

LAST_RESORTS: tuple[LastResort, ...] = get_args(LastResort)


class Recomputation:
    """Recompute every repeated block of a module in backward, on all ranks together.

    Gradients, random numbers and updates stay bitwise what they are. Blocks that keep some of their activations
    (`ActivationCheckpointing` with `selective` or `choices`) keep none from then on. Compiled blocks, those with
    Hugging Face's own checkpointing and those whose activations are offloaded stay as they are.
    """

    def __init__(self, module: nn.Module, is_allowed: bool, consensus: RankConsensus) -> None:
        self._module = module
        self._is_allowed = is_allowed
        self._consensus = consensus
        self._is_on = False
        self._applied: AppliedCheckpointing | None = None
        self._before: list[tuple[CheckpointedForward, Choice]] = []
        self._enable_caches: Callable[[], None] | None = None
        self._num_blocks = 0

    def start(self) -> str | None:
        """Start it and return what it did; None if nothing is left to do."""
        if not self._is_allowed or self._is_on:
            return None
        from lightning_memfit.checkpointing.apply import apply_checkpointing, disable_caches

        plain, partial = self._blocks()
        self._num_blocks = len(plain) + len(partial)
        if not self._consensus.any_of([self._num_blocks > 0])[0]:
            return None
        self._enable_caches = disable_caches(self._module)
        self._applied = apply_checkpointing(plain, ["full"] * len(plain))
        self._before = [(forward, forward.choice) for forward in partial]
        for forward in partial:
            forward.choice = "full"
        self._is_on = True
        return self._description

    def summary(self) -> str:
        """Describe what was done, or why it could not be, for the error when that was not enough."""
        if self._is_on:
            return f" even with {self._description}."
        return ". No recomputation: there is no repeated block that keeps activations." if self._is_allowed else "."

    def close(self) -> None:
        """Make blocks keep what they kept before."""
        if self._applied is not None:
            self._applied.remove()
        for forward, choice in self._before:
            forward.choice = choice
        if self._enable_caches is not None:
            self._enable_caches()
        self._applied, self._before, self._enable_caches, self._is_on = None, [], None, False

    @property
    def _description(self) -> str:
        return f"the activations of {self._num_blocks} more blocks recomputed in backward"

    def _blocks(self) -> "tuple[list[nn.Module], list[CheckpointedForward]]":
        """Return the blocks that keep everything, and the forwards of those that keep a part."""
        from lightning_memfit.checkpointing.apply import CheckpointedForward, is_checkpointed
        from lightning_memfit.checkpointing.blocks import find_blocks

        plain: list[nn.Module] = []
        partial: list[CheckpointedForward] = []
        for block in (module for group in find_blocks(self._module) for module in group.modules):
            forward = vars(block).get("forward")
            if isinstance(forward, CheckpointedForward) and forward.choice not in ("full", "offload_inputs"):
                partial.append(forward)
            elif not (is_checkpointed(block) or _is_compiled(block)):
                plain.append(block)
        return plain, partial


def _is_compiled(block: nn.Module) -> bool:
    return any(getattr(child, "_compiled_call_impl", None) is not None for child in block.modules())
