"""`TextData`: text from local files or the Hugging Face hub, for causal language models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from lightning_memfit.data.packed import PackedText
from lightning_memfit.data.sources import Documents, check_texts, content_hash
from lightning_memfit.data.token_files import Source
from lightning_memfit.data.tokenization import encode, token_dtype, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextEncoder:
    """Rows are texts; `encode` says how each begins and ends. A `RowEncoder`."""

    column: str
    tokenizer: PreTrainedTokenizerBase

    @property
    def dtype(self) -> np.dtype:
        """The smallest that holds every id."""
        return token_dtype(len(self.tokenizer))

    @property
    def identity(self) -> list[str]:
        """The column and the tokenizer."""
        return [self.column, tokenizer_fingerprint(self.tokenizer)]

    def check(self, documents: Documents, dataset: str) -> None:
        """Refuse a column that is missing or has something else than text."""
        check_texts(documents, self.column, "text_column", dataset)

    def encode(self, rows: Sequence[Any], first: int) -> list[tuple[np.ndarray, int]]:
        """Return tokens and hash of every text that isn't empty."""
        texts = [text for text in rows if text]
        return list(zip(encode(self.tokenizer, texts), map(content_hash, texts), strict=True))

    def nothing(self, num_rows: int) -> str:
        """Say that all texts are empty."""
        return f"`text_column={self.column!r}`: none of the {num_rows} documents has any text."


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
        global_batch_size: Blocks in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the documents kept for validation, chosen by their content.
        num_workers: Loader processes.
        tokenize_workers: Processes that tokenize.
        seed: Seed for the order of the training blocks.
        cache_dir: Folder for tokenized data. Null: the cache of `datasets`.

    Raises:
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
        global_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 2,
        tokenize_workers: int = 1,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(tokenizer, sequence_length, batch_size, global_batch_size, val_fraction, num_workers, seed)
        self.source = Source(dataset, dataset_config, split, val_split, val_fraction, tokenize_workers, cache_dir)
        self.text_column = text_column
        self.save_hyperparameters()

    @override
    def prepare_data(self) -> None:
        """Download, tokenize and write the token files in one process."""
        self.load_tokens()

    @override
    def load_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Map the token files, and write those that are missing."""
        train, val = self.source.load(TextEncoder(self.text_column, self.tokenizer))
        if val is not None:
            return train, val
        tokens = np.asarray(train)
        cut = round(len(tokens) * (1 - self.val_fraction))
        return tokens[:cut], tokens[cut:]
