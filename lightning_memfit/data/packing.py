"""Documents packed end to end into blocks of equal length: no padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


def join(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Put documents, which carry their end-of-sequence token, one after the other.

    Raises:
        ValueError: If there are none.
    """
    if not documents:
        raise ValueError("There are no documents to pack.")
    return np.concatenate(documents)


class PackedBlocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of `sequence_length` consecutive tokens; what is left at the end of the text is not used.

    Items are `{"input_ids": (sequence_length,), "labels": (sequence_length,)}`, int64; the model shifts the labels. An
    array mapped from a file stays one: workers map the file again instead of copying it.

    Args:
        tokens: `(tokens,)` integers, in memory or from `np.load(..., mmap_mode="r")`.
        sequence_length: Tokens in a block.
        name: What the text is called in errors.

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
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Block {index} of {len(self)}.")
        start = index * self.sequence_length
        block = torch.from_numpy(self.tokens[start : start + self.sequence_length].astype(np.int64))
        return {"input_ids": block, "labels": block}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap):
            state["tokens"] = str(self.tokens.filename)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, str):
            self.tokens = np.load(self.tokens, mmap_mode="r")
