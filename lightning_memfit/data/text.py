"""`TextData`: text from local files or the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_memfit.data.packed import PackedText
from lightning_memfit.data.sources import load_documents
from lightning_memfit.data.splitting import validation_mask
from lightning_memfit.data.token_files import tokenize_documents, write_tokens

if TYPE_CHECKING:
    from datasets import Dataset


class TextData(PackedText):
    """Text for causal language models, tokenized once, packed into blocks without padding.

    Documents are split into training and validation by their content. A single document is cut: its last part
    validates.

    Args:
        dataset: Local file or folder of txt (one document a file), jsonl or parquet files, or a hub name.
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
        seed: Of the order of the training blocks.
        cache_dir: Where tokenized data are kept. Null: the cache of `datasets`.

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
        if tokenize_workers < 1:
            raise ValueError(f"`tokenize_workers={tokenize_workers}` must be at least 1.")
        self.dataset = dataset
        self.dataset_config = dataset_config
        self.split = split
        self.val_split = val_split
        self.text_column = text_column
        self.tokenize_workers = tokenize_workers
        self.cache_dir = cache_dir
        self.save_hyperparameters()

    def prepare_data(self) -> None:
        """Download, tokenize and write the token files, on one process."""
        self.load_tokens()

    def load_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Map the token files, writing them where they are missing."""
        documents = self._tokenized(self.split)
        if self.val_split is not None:
            return self._write(documents, "all"), self._write(self._tokenized(self.val_split), "all")
        if len(documents) == 1:
            tokens = np.asarray(self._write(documents, "all"))
            cut = round(len(tokens) * (1 - self.val_fraction))
            return tokens[:cut], tokens[cut:]
        mask = validation_mask(documents.with_format("numpy")["hash"][:], self.val_fraction)
        part = f"{self.val_fraction:g}"
        return self._write(documents, f"train-{part}", ~mask), self._write(documents, f"val-{part}", mask)

    def _tokenized(self, split: str) -> Dataset:
        documents = load_documents(self.dataset, self.dataset_config, split, self.cache_dir)
        return tokenize_documents(documents, self.text_column, self.tokenizer, self.tokenize_workers)

    def _write(self, documents: Dataset, name: str, keep: np.ndarray | None = None) -> np.ndarray:
        from datasets import config

        return write_tokens(documents, Path(self.cache_dir or config.HF_DATASETS_CACHE) / "memfit", name, keep)
