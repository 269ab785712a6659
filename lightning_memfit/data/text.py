"""`TextData`: text from local files or the Hugging Face hub, for causal language models.

Documents are packed end to end into blocks of equal length (`PackedBlocks`), so there is no padding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memfit.data.batched import BatchedSamples, at_least
from lightning_memfit.data.sources import RowEncoder, Source, content_hash
from lightning_memfit.data.tokenization import encode, token_dtype, tokenizer_fingerprint

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1 << 24


class MappedTokens(Dataset[dict[str, torch.Tensor]]):
    """Samples out of one flat array. A memory-mapped one stays so: workers map the file again instead of copying it."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def largest(self, bits: int = -1) -> int:
        """Return the largest of the tokens, of which only the given bits count."""
        parts = (self.tokens[start : start + _CHUNK] for start in range(0, len(self.tokens), _CHUNK))
        return max(int((part.astype(np.int64) & bits).max()) for part in parts)

    def __getstate__(self) -> dict[str, Any]:
        is_mapped = isinstance(self.tokens, np.memmap)
        return {**self.__dict__, "tokens": str(self.tokens.filename) if is_mapped else self.tokens}  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, str):
            self.tokens = np.load(self.tokens, mmap_mode="r")


class PackedBlocks(MappedTokens):
    """Blocks of `sequence_length` consecutive tokens; a remainder at the end of the text is not used.

    Items are `{"input_ids": (sequence_length,), "labels": (sequence_length,)}`, int64; the model shifts the labels.
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

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Block {index} of {len(self)}.")
        start = index * self.sequence_length
        block = torch.from_numpy(self.tokens[start : start + self.sequence_length].astype(np.int64))
        return {"input_ids": block, "labels": block}


class TextEncoder(RowEncoder):
    """Rows have a text; the smallest type holds every id."""

    def __init__(self, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.column, self.tokenizer = column, tokenizer
        self.dtype = token_dtype(len(tokenizer))

    @property
    @override
    def identity(self) -> list[str]:
        return [self.column, tokenizer_fingerprint(self.tokenizer)]

    @override
    def check(self, rows: datasets.Dataset, source: Source) -> None:
        source.check_texts(rows, self.column, "text_column")

    @override
    def encode(self, rows: Sequence[dict[str, Any]], first: int) -> list[tuple[np.ndarray, int]]:
        texts = [row[self.column] for row in rows if row[self.column]]
        return list(zip(encode(self.tokenizer, texts), map(content_hash, texts), strict=True))


class PackedText(BatchedSamples):
    """Text packed into blocks, for causal language models. Subclasses provide the tokens.

    Args:
        tokenizer: `bytes`, a local folder or a hub name.
        sequence_length: Tokens in a block.
        batching: Arguments of `BatchedSamples`; a sample is a block.

    Raises:
        ValueError: If a number is out of range, or the tokenizer cannot be read.
    """

    def __init__(self, tokenizer: str, sequence_length: int, **batching: Any) -> None:
        super().__init__(tokenizer=tokenizer, **batching)
        at_least(2, sequence_length=sequence_length)
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

    def largest_id(self) -> int | None:
        """Return the largest token id that occurs; None before `setup`."""
        made = [blocks for blocks in (self._train, self._val) if isinstance(blocks, PackedBlocks)]
        return max(blocks.largest() for blocks in made) if made else None

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch of the right shapes without reading data or tokenizer, for estimates and plans.

        Any data module may have this method. `vocab_size` is that of the model, None if it is not known. `input_ids`
        and `labels` are `(batch_size, sequence_length)`, int64.
        """
        tokens = self.example_tokens(self.sequence_length, vocab_size)
        return {"input_ids": tokens, "labels": tokens.clone()}


class TextData(PackedText):
    """Text for causal language models, tokenized once and packed into blocks without padding.

    Every document begins as `tokenizer(text)` begins it, with a beginning-of-sequence token if the tokenizer puts one
    there (Llama 3, Gemma), and ends with the end-of-sequence token. Documents are split into training and validation by
    their content. A single document is cut, and its last part is used for validation.

    Args:
        dataset: Local file or folder of txt (one document a file), jsonl or parquet files, a json file, or a hub name.
        tokenizer: A local folder or a hub name, or `bytes`.
        dataset_config: Configuration of a hub data set.
        split: Split of a hub data set to train on.
        val_split: Split of a hub data set to validate with. Null: `val_fraction` of the documents.
        text_column: Column with the text.
        sequence_length: Tokens in a block.
        batch_size: Blocks in a micro-batch of one device.
        tokenize_workers: Processes that tokenize.
        cache_dir: Folder for tokenized data. Null: the cache of `datasets`.
        batching: Further arguments of `BatchedSamples`.

    Raises:
        ModuleNotFoundError: When the data are read, if `datasets` isn't installed.
        ValueError: If a number is out of range, or text or tokenizer cannot be read.
    """

    def __init__(
        self,
        dataset: str,
        tokenizer: str,
        dataset_config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        text_column: str = "text",
        sequence_length: int = 1024,
        batch_size: int = 1,
        tokenize_workers: int = 1,
        cache_dir: str | None = None,
        **batching: Any,
    ) -> None:
        super().__init__(tokenizer, sequence_length, batch_size=batch_size, **batching)
        self.source = Source(dataset, dataset_config, split, val_split, self.val_fraction, tokenize_workers, cache_dir)
        self.text_column = text_column

    @override
    def prepare_data(self) -> None:
        """Download, tokenize and write the token files in one process."""
        self.load_tokens()

    @override
    def load_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Map the token files, and write those that are missing."""
        train, val = self.source.tokens(TextEncoder(self.text_column, self.tokenizer))
        if val is not None:
            return train, val
        tokens = np.asarray(train)
        cut = round(len(tokens) * (1 - self.val_fraction))
        return tokens[:cut], tokens[cut:]
