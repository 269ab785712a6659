"""Tokens of local files or of a data set of the hub, written once into flat `.npy` files, which every process maps.

What a row is, and how it becomes tokens, a `RowEncoder` says; `Source` reads, splits and keeps.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lightning_memfit.data.sources import MAPPED, HostRoom, PlainDocuments, load_documents, validation_mask

if TYPE_CHECKING:
    from datasets import Dataset

TOKENS_FORMAT = 3
"""Raised with every change to what some row becomes, so that cached tokens of before are made anew."""
_ROWS, _LETTERS = 1000, 1 << 22
"""Rows, and letters of them, that are tokenized at a time."""


class RowEncoder(Protocol):
    """How the rows of a data set become tokens. It is pickled into the processes that tokenize."""

    @property
    def column(self) -> str:
        """The column that is read."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens."""

    @property
    def identity(self) -> list[str]:
        """Everything besides the rows and the code that the tokens depend on, the same in every process."""

    def check(self, documents: Dataset | PlainDocuments, dataset: str) -> None:
        """Refuse data without the column, or with something else in it; `dataset` is for messages."""

    def encode(self, rows: Sequence[Any], first: int) -> list[tuple[np.ndarray, int]]:
        """Return tokens and content hash of every row that has any.

        Args:
            rows: Values of the column.
            first: Number of the first of them in the data, from 0, for messages.
        """

    def nothing(self, num_rows: int) -> str:
        """Say that none of so many rows has tokens."""


@dataclass(frozen=True)
class Source:
    """Where a data module's rows come from; see `TextData` for the fields."""

    dataset: str
    dataset_config: str | None
    split: str
    val_split: str | None
    val_fraction: float
    tokenize_workers: int
    cache_dir: str | None

    def __post_init__(self) -> None:
        if self.tokenize_workers < 1:
            raise ValueError(f"`tokenize_workers={self.tokenize_workers}` must be at least 1.")

    def load(self, encoder: RowEncoder) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokenize what isn't yet, and split it by content.

        Args:
            encoder: How rows become tokens.

        Returns:
            `(tokens,)` for training and for validation, mapped files if `datasets` reads the data. None in the second
            place if there is one row only, which can't be split here.

        Raises:
            ModuleNotFoundError: If `datasets` is needed, and isn't installed.
            ValueError: If the data can't be read or split.
        """
        documents = load_documents(self.dataset, self.dataset_config, self.split, self.cache_dir)
        if isinstance(documents, PlainDocuments):
            return self._in_memory(documents, encoder)
        tokenized = self._tokenize(documents, encoder)
        if self.val_split is not None:
            documents = load_documents(self.dataset, self.dataset_config, self.val_split, self.cache_dir)
            assert not isinstance(documents, PlainDocuments)  # local files were refused above: they have no splits
            return self._write(tokenized, "all"), self._write(self._tokenize(documents, encoder), "all")
        if len(tokenized) == 1:
            return self._write(tokenized, "all"), None
        mask = validation_mask(tokenized.with_format("numpy")["hash"][:], self.val_fraction)
        part = f"{self.val_fraction:g}"
        return self._write(tokenized, f"train-{part}", ~mask), self._write(tokenized, f"val-{part}", mask)

    def _in_memory(self, documents: PlainDocuments, encoder: RowEncoder) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokenize documents here, without files; the tokens are those that `datasets` gives."""
        if self.val_split is not None:
            raise ValueError(f"`val_split={self.val_split!r}` is for data sets of the hub. Local files have none.")
        encoder.check(documents, self.dataset)
        room = HostRoom(f"`dataset={self.dataset!r}`: without `datasets`, its tokens", MAPPED)
        encoded: list[tuple[np.ndarray, int]] = []
        for rows, first in _portions(row.get(encoder.column) for row in documents):
            found = encoder.encode(rows, first)
            room.take(2 * sum(tokens.nbytes for tokens, _ in found))  # they are joined
            encoded += found
        if not encoded:
            raise ValueError(encoder.nothing(len(documents)))
        room.tell()
        if len(encoded) == 1:
            return encoded[0][0], None
        # `datasets` hands hashes out as signed integers; so that both choose the same documents, they are so here, too.
        hashes = np.array([value for _, value in encoded], np.uint64).astype(np.int64)
        mask = validation_mask(hashes, self.val_fraction)
        train, val = (
            np.concatenate([tokens for (tokens, _), is_val in zip(encoded, mask, strict=True) if is_val == side])
            for side in (False, True)
        )
        return train, val

    def _tokenize(self, documents: Dataset, encoder: RowEncoder) -> Dataset:
        return tokenize_documents(documents, encoder, self.tokenize_workers, self.dataset)

    def _write(self, tokenized: Dataset, name: str, keep: np.ndarray | None = None) -> np.ndarray:
        from datasets import config

        return write_tokens(tokenized, Path(self.cache_dir or config.HF_DATASETS_CACHE) / "memfit", name, keep)


def tokenize_documents(documents: Dataset, encoder: RowEncoder, num_processes: int, dataset: str = "") -> Dataset:
    """Tokenize every document through `datasets.map`, whose cache makes the second run immediate.

    Args:
        documents: Data set with one document per row.
        encoder: How rows become tokens.
        num_processes: Number of processes that tokenize.
        dataset: What was read, for messages.

    Returns:
        A data set with the columns `tokens` and `hash`, without empty documents.

    Raises:
        ValueError: If the column is missing or has something else in it, or no document has any tokens.
    """
    from datasets import Features, Sequence, Value
    from datasets.fingerprint import Hasher

    encoder.check(documents, dataset)
    tokenized = documents.map(
        partial(_tokenize, encoder=encoder),
        batched=True,
        batch_size=_ROWS,
        with_indices=True,
        remove_columns=documents.column_names,
        features=Features({"tokens": Sequence(Value(str(encoder.dtype))), "hash": Value("uint64")}),
        num_proc=num_processes if num_processes > 1 else None,
        desc="Tokenizing",
        # By default `datasets` hashes the tokenizer object, whose internal state changes when it is first used.
        new_fingerprint=Hasher.hash([documents._fingerprint, *_code(), *encoder.identity]),
    )
    if len(tokenized) == 0:
        raise ValueError(encoder.nothing(len(documents)))
    return tokenized


def _code() -> list[str]:
    """The code that tokens depend on: this package's by a number, that of others by their versions."""
    return [str(TOKENS_FORMAT), *(f"{name} {version(name)}" for name in ("tokenizers", "transformers"))]


def _portions(rows: Iterable[Any]) -> Iterator[tuple[list[Any], int]]:
    """Rows, so many at a time that a tokenizer's own records of them stay small, and the number of the first."""
    portion: list[Any] = []
    first, letters = 0, 0
    for number, row in enumerate(rows):
        portion.append(row)
        letters += _letters(row)
        if len(portion) == _ROWS or letters > _LETTERS:
            yield portion, first
            portion, first, letters = [], number + 1, 0
    if portion:
        yield portion, first


def _letters(row: Any) -> int:
    if isinstance(row, dict):
        row = list(row.values())
    return sum(map(_letters, row)) if isinstance(row, list) else len(row) if isinstance(row, str) else 0


def _tokenize(batch: dict[str, list[Any]], indices: list[int], encoder: RowEncoder) -> dict[str, Any]:
    encoded = encoder.encode(batch[encoder.column], indices[0])
    return {"tokens": [tokens for tokens, _ in encoded], "hash": np.array([value for _, value in encoded], np.uint64)}


def write_tokens(tokenized: Dataset, folder: Path, name: str, keep: np.ndarray | None = None) -> np.ndarray:
    """Write the tokens of chosen documents into one file, unless the file exists, and map it.

    Args:
        tokenized: From `tokenize_documents`.
        folder: Folder for the file.
        name: Distinguishes files of the same data set.
        keep: `(documents,)` booleans; None keeps all.

    Returns:
        `(tokens,)` read-only array, memory-mapped.

    Raises:
        ValueError: If the file can't be written.
    """
    file = folder / f"tokens-{tokenized._fingerprint}-{name}.npy"
    if not file.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_atomically(file, partial(_fill, tokenized, keep))
        except OSError as error:
            raise ValueError(
                f"`cache_dir`: the tokens can't be written to {str(folder)!r}: {error.strerror}. Name another folder "
                "(`data.cache_dir`)."
            ) from error
    tokens: np.ndarray = np.load(file, mmap_mode="r")
    return tokens


def _fill(tokenized: Dataset, keep: np.ndarray | None, path: str) -> None:
    dtype = np.dtype(tokenized.features["tokens"].feature.dtype)
    chosen = np.ones(len(tokenized), bool) if keep is None else keep
    table = tokenized.with_format("arrow")
    length = sum(_flat(table, start, chosen).size for start in range(0, len(tokenized), _ROWS))
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    # A mapped file on a full disk would end the process, with a bus error.
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(tokenized), _ROWS):
            file.write(_flat(table, start, chosen).astype(dtype, copy=False).data)


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
