"""`PackedText`: text data modules whose samples are blocks of consecutive tokens.

Documents are packed end to end into blocks of equal length (`PackedBlocks`), so there is no padding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memfit.data.batched import BatchedText, digest_of

_CHUNK = 1 << 24
_NEAR = 128
"""Tokens on either side of a place of which a digest is made."""

# --- blocks -----------------------------------------------------------------------------------------------------------


def join(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate documents, each of which ends with its end-of-sequence token.

    Raises:
        ValueError: If there are no documents.
    """
    if not documents:
        raise ValueError("There are no documents to pack.")
    return np.concatenate(documents)


class MappedTokens(Dataset[dict[str, torch.Tensor]]):
    """Samples out of one flat array. A memory-mapped one stays so: workers map the file again instead of copying it.

    Args:
        tokens: `(tokens,)` integers, in memory or from `np.load(..., mmap_mode="r")`.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def largest(self, bits: int = -1) -> int:
        """Return the largest of the tokens, of which only the given bits count."""
        parts = (self.tokens[start : start + _CHUNK] for start in range(0, len(self.tokens), _CHUNK))
        return max(int((part.astype(np.int64) & bits).max()) for part in parts)

    def content_digest(self, *settings: Any) -> str:
        """Return a digest of the tokens at some places and of what else samples depend on."""
        tokens = self.tokens

        def read(place: int) -> bytes:
            near = tokens[max(0, place - _NEAR) : place + _NEAR]
            return near.astype(np.int64).tobytes()

        return digest_of(len(tokens), read, *settings)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap):
            state["tokens"] = str(self.tokens.filename)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, str):
            self.tokens = np.load(self.tokens, mmap_mode="r")


class PackedBlocks(MappedTokens):
    """Blocks of `sequence_length` consecutive tokens; a remainder at the end of the text is not used.

    Items are `{"input_ids": (sequence_length,), "labels": (sequence_length,)}`, int64; the model shifts the labels.

    Args:
        tokens: `(tokens,)` integers, in memory or from `np.load(..., mmap_mode="r")`.
        sequence_length: Tokens in a block.
        name: Name of the text in error messages.

    Raises:
        ValueError: If the text does not fill one block.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, name: str = "text") -> None:
        if sequence_length < 2:
            raise ValueError(f"`sequence_length={sequence_length}` must be at least 2: one token predicts the next.")
        if len(tokens) < sequence_length:
            raise ValueError(
                f"The {name} has {len(tokens)} tokens, less than one block of `sequence_length={sequence_length}`. "
                "Give more text or a shorter sequence."
            )
        super().__init__(tokens)
        self.sequence_length = sequence_length

    @override
    def content_digest(self, *settings: Any) -> str:
        """Return a digest of tokens and their division into blocks."""
        return super().content_digest(self.sequence_length, *settings)

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Block {index} of {len(self)}.")
        start = index * self.sequence_length
        block = torch.from_numpy(self.tokens[start : start + self.sequence_length].astype(np.int64))
        return {"input_ids": block, "labels": block}


# --- the data module --------------------------------------------------------------------------------------------------


class PackedText(BatchedText):
    """Text packed into blocks, for causal language models. Subclasses provide the tokens.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        sequence_length: Tokens in a block.
        batch_size: Blocks in a micro-batch of one device.
        global_batch_size: Blocks in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the documents kept for validation, chosen by their content.
        num_workers: Loader processes.
        seed: Seed for the order of the training blocks.

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
        """Return the tokens for training and validation, each `(tokens,)`."""

    @override
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Cut the tokens into blocks."""
        train, val = self.load_tokens()
        blocks = PackedBlocks(train, self.sequence_length, "training text")
        return blocks, PackedBlocks(val, self.sequence_length, "validation text")

    @override
    def largest_id(self) -> int | None:
        """Return the largest token id that occurs; None before `setup`."""
        made = [blocks for blocks in (self._train, self._val) if isinstance(blocks, PackedBlocks)]
        return max(blocks.largest() for blocks in made) if made else None

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch of the right shapes without reading data or tokenizer, for estimates and plans.

        Any data module may have this method.

        Args:
            vocab_size: Number of token ids that the model takes; None if it is not known.

        Returns:
            `input_ids` and `labels`, both `(batch_size, sequence_length)`, int64.

        Raises:
            ValueError: If the batch sizes contradict each other, or the batch is too large to be made.
        """
        tokens = self._example_tokens(self.sequence_length, vocab_size)
        return {"input_ids": tokens, "labels": tokens.clone()}
