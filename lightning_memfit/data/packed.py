"""`PackedText`: text data modules whose samples are blocks of consecutive tokens."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from torch.utils.data import Dataset

from lightning_memfit.data.batched import BatchedText
from lightning_memfit.data.packing import PackedBlocks


class PackedText(BatchedText):
    """Text packed into blocks, for causal language models. Subclasses say where the tokens come from.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        sequence_length: Tokens in a block.
        batch_size: Blocks in a micro-batch of one device.
        global_batch_size: Blocks in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the documents kept for validation, chosen by their content.
        num_workers: Loader processes.
        seed: Of the order of the training blocks.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        tokenizer: str,
        sequence_length: int,
        batch_size: int,
        global_batch_size: int | None,
        val_fraction: float,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__(tokenizer, batch_size, global_batch_size, val_fraction, num_workers, seed)
        if sequence_length < 2:
            raise ValueError(f"`sequence_length={sequence_length}` must be at least 2.")
        self.sequence_length = sequence_length

    @abstractmethod
    def load_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of training and validation, each `(tokens,)`."""

    def make_samples(self) -> tuple[Dataset, Dataset]:
        """Cut the tokens into blocks."""
        train, val = self.load_tokens()
        blocks = PackedBlocks(train, self.sequence_length, "training text")
        return blocks, PackedBlocks(val, self.sequence_length, "validation text")
