"""`ActivationCheckpointing`: recompute blocks in the backward pass instead of keeping their activations."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_memfit.checkpointing.apply import apply_checkpointing, disable_caches, refuse_checkpointed
from lightning_memfit.checkpointing.blocks import BlockGroup, find_blocks, select_blocks
from lightning_memfit.checkpointing.policies import Choice, Keep, Mode, check_mode, choices_for
from lightning_memfit.checkpointing.segments import apply_segments
from lightning_memfit.techniques.base import TechniqueCallback, describe
from lightning_memfit.techniques.wrapping import wrap_method


class ActivationCheckpointing(TechniqueCallback):
    """Checkpoint the repeated blocks of the module: exact gradients, less memory, up to a third more time.

    Args:
        mode: `full` (keep only each block's inputs), `every` (one block in `every`), `selective` (keep also the outputs
            named by `keep`), `sqrt` (segments of about sqrt(n) blocks; only for blocks in an nn.Sequential) or `none`.
        every: With mode `every`: checkpoint one block in this many.
        keep: With mode `selective`: `attention` (fused kernels' outputs), `matmul` (products with weights) or both.
        blocks: Class name, or dotted names of blocks or of their containers; by default they are found by structure.
        choices: Instead of a mode, one of `none`, `full`, `keep_attention`, `keep_matmul`, `keep_matmul_attention` for
            each block, as a plan gives them.

    Raises:
        ValueError: If the arguments do not fit together.
    """

    def __init__(
        self,
        mode: Mode = "full",
        every: int | None = None,
        keep: Sequence[Keep] = (),
        blocks: str | Sequence[str] | None = None,
        choices: Sequence[Choice] | None = None,
    ) -> None:
        super().__init__()
        check_mode(mode, every, tuple(keep))
        if choices is not None and mode != "full":
            raise ValueError(f"`choices` replaces a mode; leave `mode={mode!r}` out.")
        self.mode = mode
        self.every = every
        self.keep = tuple(keep)
        self.blocks = blocks
        self.choices = None if choices is None else tuple(choices)

    @property
    def depends_on_depth(self) -> bool:
        """True where not every block is checkpointed alike."""
        return self.choices is not None or self.mode in ("every", "sqrt")

    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap `configure_model`: the model is complete after it, and not yet wrapped by the strategy."""

        def configure(inner: Callable[[], Any]) -> None:
            inner()
            self._checkpoint(pl_module)

        self.on_restore(wrap_method(pl_module, "configure_model", configure))

    def _checkpoint(self, module: nn.Module) -> None:
        refuse_checkpointed(module)
        groups = select_blocks(module, self.blocks) if self.blocks is not None else find_blocks(module)
        if not groups:
            raise ValueError(
                f"{type(module).__name__} has no ModuleList or Sequential with two or more blocks of one class. Name "
                "what to checkpoint with `blocks`: a class name, or dotted names such as `model.encoder.layers`."
            )
        self.on_restore(disable_caches(module))
        if self.mode == "sqrt":
            applied = apply_segments(module, groups)
        else:
            blocks = [block for group in groups for block in group.modules]
            applied = apply_checkpointing(blocks, self._choices(len(blocks)))
        self.on_restore(applied.remove)
        self.announce(f"{self._label()}, {describe(_count(groups))} found, {applied.num_blocks} checkpointed")

    def _choices(self, num_blocks: int) -> tuple[Choice, ...]:
        return self.choices or choices_for(self.mode, num_blocks, self.every, self.keep)

    def _label(self) -> str:
        if self.choices is not None:
            return "choices " + describe(Counter(self.choices))
        detail = self.every if self.every is not None else "+".join(self.keep)
        return f"mode {self.mode}{f' ({detail})' if detail else ''}"


def _count(groups: list[BlockGroup]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.class_name] += len(group.modules)
    return dict(counts)
