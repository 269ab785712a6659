"""`TextData`: text from local files or the Hugging Face hub, for causal language models.

Tokens are written once into flat `.npy` files of 2 bytes per token, which every process maps instead of copying.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from lightning_memfit.data.packed import PackedText, join
from lightning_memfit.data.sources import (
    MAPPED,
    HostRoom,
    PlainDocuments,
    check_texts,
    content_hash,
    load_documents,
    validation_mask,
)
from lightning_memfit.data.tokenization import encode, token_dtype, tokenizer_fingerprint

# --- token files ------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_ROWS, _LETTERS = 1000, 1 << 22
"""Documents, and letters of them, that are tokenized at a time."""


def tokenize_documents(
    documents: Dataset, column: str, tokenizer: PreTrainedTokenizerBase, num_processes: int, dataset: str = ""
) -> Dataset:
    """Tokenize every document through `datasets.map`, whose cache makes the second run immediate.

    Args:
        documents: Data set with one document per row.
        column: Column with the text.
        tokenizer: From `load_tokenizer`.
        num_processes: Number of processes that tokenize.
        dataset: What was read, for messages.

    Returns:
        A data set with the columns `tokens` (end of sequence included) and `hash`, without empty documents.

    Raises:
        ValueError: If the column is missing or isn't text, or no document has any text.
    """
    from datasets import Features, Sequence, Value
    from datasets.fingerprint import Hasher

    check_texts(documents, column, "text_column", dataset)
    kind = str(token_dtype(len(tokenizer)))
    tokenized = documents.map(
        partial(_tokenize, column=column, tokenizer=tokenizer),
        batched=True,
        batch_size=_ROWS,
        remove_columns=documents.column_names,
        features=Features({"tokens": Sequence(Value(kind)), "hash": Value("uint64")}),
        num_proc=num_processes if num_processes > 1 else None,
        desc="Tokenizing",
        # By default `datasets` hashes the tokenizer object, whose internal state changes when it is first used.
        new_fingerprint=Hasher.hash([documents._fingerprint, column, tokenizer_fingerprint(tokenizer)]),
    )
    if len(tokenized) == 0:
        raise ValueError(f"`text_column={column!r}`: none of the {len(documents)} documents has any text.")
    return tokenized


def write_tokens(tokenized: Dataset, folder: Path, name: str, keep: np.ndarray | None = None) -> np.ndarray:
    """Write the tokens of chosen documents into one file, unless the file exists, and map it.

    Args:
        tokenized: From `tokenize_documents`.
        folder: Folder for the file.
        name: Distinguishes files of the same data set.
        keep: `(documents,)` booleans; None keeps all.

    Returns:
        `(tokens,)` read-only array, memory-mapped.
    """
    file = folder / f"tokens-{tokenized._fingerprint}-{name}.npy"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(file, partial(_fill, tokenized, keep))
    tokens: np.ndarray = np.load(file, mmap_mode="r")
    return tokens


def _tokenize(batch: dict[str, list[Any]], column: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    texts = [text for text in batch[column] if text]
    return {"tokens": encode(tokenizer, texts), "hash": np.array([content_hash(text) for text in texts], np.uint64)}


def _portions(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts that aren't empty, so many at a time that a tokenizer's own records of them stay small."""
    portion: list[str] = []
    letters = 0
    for text in filter(None, texts):
        portion.append(text)
        letters += len(text)
        if len(portion) == _ROWS or letters > _LETTERS:
            yield portion
            portion, letters = [], 0
    if portion:
        yield portion


def _fill(tokenized: Dataset, keep: np.ndarray | None, path: str) -> None:
    dtype = np.dtype(tokenized.features["tokens"].feature.dtype)
    chosen = np.ones(len(tokenized), bool) if keep is None else keep
    table = tokenized.with_format("arrow")
    lengths = [_flat(table, start, chosen).size for start in range(0, len(tokenized), _ROWS)]
    target = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(sum(lengths),))
    position = 0
    for start, length in zip(range(0, len(tokenized), _ROWS), lengths, strict=True):
        target[position : position + length] = _flat(table, start, chosen)
        position += length
    target.flush()


def _flat(table: Dataset, start: int, chosen: np.ndarray) -> np.ndarray:
    rows = table[start : start + _ROWS].column("tokens").combine_chunks()
    tokens: np.ndarray = rows.filter(chosen[start : start + _ROWS]).flatten().to_numpy()
    return tokens


def _write_atomically(file: Path, write: Callable[[str], None]) -> None:
    """Write a temporary file next to it and rename that, so that an interrupted run leaves no partial file."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".partial")
    os.close(handle)
    try:
        write(temporary)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# --- the data module --------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from datasets import Dataset


class TextData(PackedText):
    """Text for causal language models, tokenized once and packed into blocks without padding.

    Documents are split into training and validation by their content. A single document is cut, and
    its last part is used for validation.

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

    @override
    def prepare_data(self) -> None:
        """Download, tokenize and write the token files in one process."""
        self.load_tokens()

    @override
    def load_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Map the token files, and write those that are missing."""
        documents = load_documents(self.dataset, self.dataset_config, self.split, self.cache_dir)
        if isinstance(documents, PlainDocuments):
            return self._split_in_memory(documents)
        documents = self._tokenize(documents)
        if self.val_split is not None:
            return self._write(documents, "all"), self._write(self._tokenize(self._of_validation()), "all")
        if len(documents) == 1:
            tokens = np.asarray(self._write(documents, "all"))
            cut = round(len(tokens) * (1 - self.val_fraction))
            return tokens[:cut], tokens[cut:]
        mask = validation_mask(documents.with_format("numpy")["hash"][:], self.val_fraction)
        part = f"{self.val_fraction:g}"
        return self._write(documents, f"train-{part}", ~mask), self._write(documents, f"val-{part}", mask)

    def _split_in_memory(self, documents: PlainDocuments) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize documents here, without files; the tokens are those that `datasets` gives."""
        if self.val_split is not None:
            raise ValueError(f"`val_split={self.val_split!r}` is for data sets of the hub. Local files have none.")
        check_texts(documents, self.text_column, "text_column", self.dataset)
        room = HostRoom(f"`dataset={self.dataset!r}`: without `datasets`, its tokens", MAPPED)
        tokens: list[np.ndarray] = []
        hashes: list[int] = []
        for texts in _portions(row[self.text_column] for row in documents):
            encoded = encode(self.tokenizer, texts)
            room.take(2 * sum(one.nbytes for one in encoded))  # they are joined
            tokens += encoded
            hashes += map(content_hash, texts)
        if not tokens:
            raise ValueError(
                f"`text_column={self.text_column!r}`: none of the {len(documents)} documents has any text."
            )
        room.tell()
        if len(tokens) == 1:
            cut = round(len(tokens[0]) * (1 - self.val_fraction))
            return tokens[0][:cut], tokens[0][cut:]
        # `datasets` hands hashes out as signed integers; so that both choose the same documents, they are so here, too.
        mask = validation_mask(np.array(hashes, np.uint64).astype(np.int64), self.val_fraction)
        train, val = (
            [one for one, is_val in zip(tokens, mask, strict=True) if is_val == side] for side in (False, True)
        )
        return join(train), join(val)

    def _tokenize(self, documents: Dataset) -> Dataset:
        return tokenize_documents(documents, self.text_column, self.tokenizer, self.tokenize_workers, self.dataset)

    def _of_validation(self) -> Any:
        return load_documents(self.dataset, self.dataset_config, str(self.val_split), self.cache_dir)

    def _write(self, documents: Dataset, name: str, keep: np.ndarray | None = None) -> np.ndarray:
        from datasets import config

        return write_tokens(documents, Path(self.cache_dir or config.HF_DATASETS_CACHE) / "memfit", name, keep)
