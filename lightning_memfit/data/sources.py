"""Rows of local files or of the hub, read by Hugging Face `datasets`, and their tokens.

Rows are split into training and validation by their content (`validation_mask`). Tokens are written once into flat
`.npy` files, which every process maps. What a row is, and how it becomes tokens, a `RowEncoder` says.
"""

from __future__ import annotations

import glob
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.extras import require
from lightning_memfit.hub import is_offline, is_reachable

if TYPE_CHECKING:
    from datasets import Dataset

TOKENS_FORMAT = 4
"""Raised with every change to what some row becomes, so that cached tokens of before are made anew."""

# A byte order mark, which editors put at the beginning of a file, is no part of the text. A text file is one document.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".json": ("json", {}),
}
_ENDINGS = (".txt", ".jsonl", ".parquet")
"""Of files in folders. A .json file, which is one list, is named itself: those in folders are rarely the data."""
_ROWS = 1000


class RowEncoder(ABC):
    """How the rows of a data set become tokens. It is pickled into the processes that tokenize."""

    column: str  # which has to have something
    dtype: np.dtype  # of the tokens

    @property
    @abstractmethod
    def identity(self) -> list[str]:
        """Everything besides the rows and the code that the tokens depend on, the same in every process."""

    @abstractmethod
    def check(self, rows: Dataset, source: Source) -> None:
        """Refuse data without the column, or with something else in it."""

    @abstractmethod
    def encode(self, rows: Sequence[dict[str, Any]], first: int) -> list[tuple[np.ndarray, int]]:
        """Return tokens and content hash of every row that has any; `first` is the number of the first, from 0."""


@dataclass(frozen=True)
class Source:
    """Where a data module's rows come from; see `TextData` for the fields."""

    dataset: str
    dataset_config: str | None = None
    split: str = "train"
    val_split: str | None = None
    val_fraction: float = 0.05
    tokenize_workers: int = 1
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.tokenize_workers < 1:
            raise ValueError(f"`tokenize_workers={self.tokenize_workers}` must be at least 1.")

    # --- rows -------------------------------------------------------------------------------------------------------

    def rows(self, split: str | None = None) -> Dataset:
        """Return the rows of a split, by default that to train on."""
        split = self.split if split is None else split
        require("datasets", f"`dataset={self.dataset!r}`: reading it")
        path = Path(self.dataset).expanduser()
        if path.exists():
            if self.dataset_config is not None or split != "train":
                raise ValueError(
                    f"`dataset={self.dataset!r}` is local: `dataset_config` and other splits are for the hub."
                )
            return self._read_files(local_files(path))
        if self.dataset.startswith((".", "/", "~")) or path.suffix in _READERS or self.dataset.count("/") > 1:
            raise ValueError(f"`dataset={self.dataset!r}` is a path, but there is no such file or folder.")
        return self._fetch(split)

    def _read_files(self, files: list[Path]) -> Dataset:
        from datasets import load_dataset

        reader, options = _READERS[files[0].suffix.lower()]
        names = {"train": [str(file) for file in files]}
        try:
            return load_dataset(reader, data_files=names, split="train", cache_dir=self.cache_dir, **options)
        except Exception as error:  # of `datasets`, pyarrow or pandas
            cause = " ".join(str(error.__cause__ or error).split())
            raise ValueError(f"`dataset={self.dataset!r}` cannot be read as {reader} files: {cause}") from error

    def _fetch(self, split: str) -> Dataset:
        from datasets import load_dataset

        try:
            return load_dataset(self.dataset, self.dataset_config, split=split, cache_dir=self.cache_dir)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            if is_offline() or not is_reachable():
                reason = "it is not in the cache, and the hub can't be reached"
            raise ValueError(
                f"`dataset={self.dataset!r}` is neither a local file or folder ({', '.join(_ENDINGS)}) nor could it be "
                f"fetched from the Hugging Face hub ({reason}). Give a local path to train without network, for model "
                f"and tokenizer, too; `hf download --repo-type dataset {self.dataset} --local-dir FOLDER` makes one on "
                "a machine with network."
            ) from error

    def check_texts(self, rows: Dataset, column: str, argument: str) -> None:
        """Refuse a column that has something else than text in any row, or nothing at all."""
        check_column(rows, column, argument)
        values, kind = rows.data.column(column), getattr(rows.features[column], "dtype", None)
        if values.null_count or kind not in ("string", "large_string"):
            first = values.is_null().to_numpy().argmax() + 1 if values.null_count else 0
            missing = f"{values.null_count:,} of {len(values):,} rows have no value, number {first:,} the first of them"
            found = missing if values.null_count else str(rows.features[column])
            raise ValueError(f"`{argument}={column!r}` has something else than text: {found}.")

    # --- tokens -----------------------------------------------------------------------------------------------------

    def tokens(self, encoder: RowEncoder) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokenize what isn't yet, and split it by content."""
        tokenized = self._tokenize(self.rows(), encoder)
        if self.val_split is not None:
            return self._map(tokenized, "all"), self._map(self._tokenize(self.rows(self.val_split), encoder), "all")
        if len(tokenized) == 1:
            return self._map(tokenized, "all"), None
        mask = validation_mask(tokenized.with_format("numpy")["hash"][:], self.val_fraction)
        part = f"{self.val_fraction:g}"
        return self._map(tokenized, f"train-{part}", ~mask), self._map(tokenized, f"val-{part}", mask)

    def _tokenize(self, rows: Dataset, encoder: RowEncoder) -> Dataset:
        """Tokenize every row through `datasets.map`, whose cache makes the second run immediate."""
        from datasets import Features, List, Value
        from datasets.fingerprint import Hasher

        encoder.check(rows, self)
        # The code that tokens depend on: this package's by a number, that of others by their versions.
        code = [str(TOKENS_FORMAT), *(f"{name} {version(name)}" for name in ("tokenizers", "transformers"))]
        try:
            tokenized = rows.map(
                partial(_encoded, encoder=encoder),
                batched=True,
                batch_size=_ROWS,
                with_indices=True,
                remove_columns=rows.column_names,
                features=Features({"tokens": List(Value(str(encoder.dtype))), "hash": Value("uint64")}),
                num_proc=self.tokenize_workers if self.tokenize_workers > 1 else None,
                desc="Tokenizing",
                # `datasets` would hash the tokenizer object, whose internal state changes when it is first used.
                new_fingerprint=Hasher.hash([rows._fingerprint, *code, *encoder.identity]),
            )
        except UnicodeDecodeError as error:
            raise ValueError(f"`dataset={self.dataset!r}` is not UTF-8 ({error}). Save its files as UTF-8.") from error
        if len(tokenized) == 0:
            raise ValueError(
                f"`dataset={self.dataset!r}`: none of the {len(rows)} rows has anything in {encoder.column!r}."
            )
        return tokenized

    def _map(self, tokenized: Dataset, name: str, keep: np.ndarray | None = None) -> np.ndarray:
        """Write the tokens of chosen rows into one file, unless the file exists, and map it."""
        from datasets import config

        folder = Path(self.cache_dir or config.HF_DATASETS_CACHE) / "memfit"
        file = folder / f"tokens-{tokenized._fingerprint}-{name}.npy"
        if not file.exists():
            partial_file = file.with_suffix(f".{os.getpid()}.partial")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_tokens(tokenized, keep, partial_file)
                os.replace(partial_file, file)
            except OSError as error:
                raise ValueError(
                    f"`cache_dir`: the tokens can't be written to {str(folder)!r}: {error.strerror}. Name another "
                    "folder (`data.cache_dir`)."
                ) from error
            finally:
                partial_file.unlink(missing_ok=True)
        tokens: np.ndarray = np.load(file, mmap_mode="r")
        return tokens


def check_column(rows: Dataset, column: str, argument: str) -> None:
    """Refuse data without a column."""
    if column not in rows.column_names:
        there = ", ".join(rows.column_names)
        raise ValueError(f"`{argument}={column!r}` is not in the data. Its columns: {there}.")


def _encoded(batch: dict[str, list[Any]], indices: list[int], encoder: RowEncoder) -> dict[str, Any]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    encoded = encoder.encode(rows, indices[0])
    return {"tokens": [tokens for tokens, _ in encoded], "hash": np.array([value for _, value in encoded], np.uint64)}


def write_tokens(tokenized: Dataset, keep: np.ndarray | None, file: Path) -> None:
    """Write the tokens of chosen rows, `(rows,)` booleans or None for all, one after the other into an `.npy` file.

    A mapped file on a full disk would end the process, with a bus error.
    """
    table, chosen = tokenized.with_format("arrow"), np.ones(len(tokenized), bool) if keep is None else keep

    def part(start: int) -> np.ndarray:
        rows = table[start : start + _ROWS].column("tokens").combine_chunks()
        tokens: np.ndarray = rows.filter(chosen[start : start + _ROWS]).flatten().to_numpy()
        return tokens

    starts = range(0, len(tokenized), _ROWS)
    dtype = np.dtype(tokenized.features["tokens"].feature.dtype)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, {**header, "shape": (sum(part(start).size for start in starts),)})
        for start in starts:
            opened.write(part(start).astype(dtype, copy=False).data)


# --- local files ------------------------------------------------------------------------------------------------------


def local_files(path: Path) -> list[Path]:
    """Return the files to read, sorted, all of one kind; hidden ones are left out, and others with a warning."""
    found = [path]
    if path.is_dir():
        inside = map(Path, glob.glob(f"{glob.escape(str(path))}/**/*", recursive=True))
        files = sorted(file for file in inside if not file.is_dir())
        found = [file for file in files if file.suffix.lower() in _ENDINGS]
        others = sorted({file.suffix or file.name for file in files if file not in found})
        if others:
            rank_zero_warn(
                f"`dataset={str(path)!r}`: only {', '.join(_ENDINGS)} files are read, not {', '.join(others)}."
            )
    kinds = sorted({file.suffix.lower() for file in found})
    if not found or kinds[0] not in _READERS:
        wanted = f"Wanted: {', '.join(_ENDINGS)}, or a .json file itself."
        raise ValueError(f"`dataset={str(path)!r}` has no text files. {wanted}")
    if len(kinds) > 1:
        raise ValueError(f"`dataset={str(path)!r}` mixes {', '.join(kinds)} files. Keep one kind in a folder.")
    return found


# --- splitting rows by their content ----------------------------------------------------------------------------------


def content_hash(text: str) -> int:
    """Return the 64-bit hash of a document, which is the same on every machine."""
    encoded = text.encode("utf-8", "surrogateescape")  # names of files may be in another encoding
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def validation_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Choose the documents with the smallest hashes for validation.

    The choice depends neither on the order of the documents nor on a seed, and equal documents are in the same split.
    """
    wanted = max(1, round(len(hashes) * fraction))
    mask = hashes <= np.partition(hashes, wanted - 1)[wanted - 1] if len(hashes) else np.zeros(0, bool)
    if not mask.any() or mask.all():
        raise ValueError(
            f"{len(hashes)} documents ({len(np.unique(hashes))} different ones) cannot be split into training and "
            f"validation with `val_fraction={fraction}`. Give more documents or a smaller fraction."
        )
    return mask
