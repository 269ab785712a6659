"""Where text comes from: local files, or a data set of the hub through Hugging Face `datasets`.

Without `datasets`, which is an extra, txt and jsonl files are read here (`PlainDocuments`), into memory.

The files are read as one document per row; `validation_mask` splits documents into training and validation by content.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_memfit.extras import is_installed, require
from lightning_memfit.hub import is_offline, is_reachable

if TYPE_CHECKING:
    from datasets import Dataset

# File endings, with the reader in `datasets` and its options. A text file is one document.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
_ENDINGS = ", ".join(_READERS)


class PlainDocuments:
    """Rows of local files, held in memory: as much of a `datasets.Dataset` as is needed here.

    Args:
        rows: One dictionary per document.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.column_names = sorted({name for row in rows for name in row})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row.get(column) for row in self._rows]


def _read_plainly(path: Path) -> PlainDocuments:
    """Read txt and jsonl files without `datasets`.

    Raises:
        ModuleNotFoundError: If the files are of another kind.
        ValueError: If a file can't be read.
    """
    files = local_files(path)
    if files[0].suffix not in (".txt", ".jsonl"):
        require("datasets", f"`dataset={str(path)!r}`: reading {files[0].suffix} files")
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".txt":
                rows.append({"text": text})
                continue
            for number, line in enumerate(text.split("\n"), 1):
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no object")
                rows += [row] if row else []
        except ValueError as error:
            reason = _fault_in(file) or str(error)
            raise ValueError(f"`dataset`: the file {str(file)!r} cannot be read: {reason}") from error
    return PlainDocuments(rows)


def load_documents(
    dataset: str, dataset_config: str | None, split: str, cache_dir: str | None
) -> Dataset | PlainDocuments:
    """Return a data set with one document per row.

    Args:
        dataset: Local file or folder of txt, jsonl or parquet files, or a hub name.
        dataset_config: Configuration name of a hub data set.
        split: Split of a hub data set; local files have only `train`.
        cache_dir: Where `datasets` keeps its files.

    Raises:
        ModuleNotFoundError: If `datasets` is needed, and isn't installed.
        ValueError: If there is nothing to read, or the hub cannot be reached.
    """
    path = Path(dataset).expanduser()
    if path.exists():
        if dataset_config is not None or split != "train":
            raise ValueError(f"`dataset={dataset!r}` is local: `dataset_config` and other splits are for the hub.")
        return _load_files(path, cache_dir) if is_installed("datasets") else _read_plainly(path)
    if path.is_symlink():
        raise ValueError(f"`dataset={dataset!r}` is a link to {str(path.readlink())!r}, which is not there. Mend it.")
    if dataset.startswith((".", "/", "~")) or path.suffix in _READERS or dataset.count("/") > 1:
        raise ValueError(f"`dataset={dataset!r}` is a path, but there is no such file or folder.")
    return _load_from_hub(dataset, dataset_config, split, cache_dir)


def _load_files(path: Path, cache_dir: str | None) -> Dataset:
    from datasets import load_dataset

    files = local_files(path)
    reader, options = _READERS[files[0].suffix]
    names = [str(file) for file in files]
    if reader == "parquet":
        for file in files:
            _check_parquet(file)
    try:
        return load_dataset(reader, data_files={"train": names}, split="train", cache_dir=cache_dir, **options)
    except Exception as error:
        place = next((found for file in files if (found := _fault_in(file))), "")
        cause = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"`dataset={str(path)!r}` cannot be read as {reader} files: {place or cause}") from error


def _check_parquet(file: Path) -> None:
    """Refuse a file that is no parquet file, of which `datasets` would log a traceback."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        read_schema(file)
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"`dataset`: the file {str(file)!r} is no parquet file: {reason}.") from error


def local_files(path: Path) -> list[Path]:
    """Return the files to read, sorted, all of one kind.

    Raises:
        ValueError: If there are no files, they are of several kinds, or one is empty or can't be read.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _READERS)
    kinds = sorted({file.suffix for file in files})
    if not files or kinds[0] not in _READERS:
        raise ValueError(f"`dataset={str(path)!r}` has no text files. Wanted: {_ENDINGS}.")
    if len(kinds) > 1:
        raise ValueError(f"`dataset={str(path)!r}` mixes {', '.join(kinds)} files. Keep one kind in a folder.")
    for file in files:
        try:
            is_empty = file.stat().st_size == 0
        except OSError as error:  # a link whose target is gone
            raise ValueError(
                f"`dataset`: the file {str(file)!r} can't be read: {error.strerror}. Remove it or mend it."
            ) from error
        if is_empty:
            raise ValueError(f"`dataset`: the file {str(file)!r} is empty. Remove it or fill it.")
    return files


def check_texts(documents: Dataset | PlainDocuments, column: str, argument: str, dataset: str = "") -> None:
    """Refuse a column that has something else than text in any row, or nothing at all.

    Files of lines may lose a column half-way; the rows after that must not be left out without a word.

    Args:
        documents: From `load_documents`.
        column: Name of the column.
        argument: The argument that names it, for messages.
        dataset: What was read, to name the file and the line.

    Raises:
        ValueError: If the column is missing, isn't text, or has rows without a value.
    """
    if column not in documents.column_names:
        there = ", ".join(documents.column_names)
        raise ValueError(f"`{argument}={column!r}` is not in the data. Its columns: {there}.")
    fault = _fault_of_column(documents, column)
    if fault:
        files = local_files(Path(dataset).expanduser()) if dataset and Path(dataset).expanduser().exists() else []
        place = next((found for file in files if (found := _fault_in(file, column))), "")
        raise ValueError(f"`{argument}={column!r}` has something else than text: {fault}. {place}".rstrip())


def _fault_of_column(documents: Dataset | PlainDocuments, column: str) -> str:
    """What a column has besides text, in words; empty if it has nothing else."""
    if isinstance(documents, PlainDocuments):
        wrong = [number for number, value in enumerate(documents[column], 1) if not isinstance(value, str)]
        if not wrong:
            return ""
        count = f"{len(wrong):,} of {len(documents):,} documents have no text"
        return f"{count}, number {wrong[0]:,} the first of them. Fill them in or remove them"
    kind = getattr(documents.features[column], "dtype", None)
    values = documents.data.column(column)
    if values.null_count:
        first = values.is_null().to_numpy().argmax() + 1
        count = f"{values.null_count:,} of {len(values):,} documents have no value"
        return f"{count}, number {first:,} the first of them. Fill them in or remove them"
    if kind not in ("string", "large_string"):
        return str(documents.features[column])
    from pyarrow import ArrowInvalid

    try:
        values.validate(full=True)
    except ArrowInvalid:
        return "bytes that are not UTF-8"
    return ""


def _fault_in(file: Path, column: str | None = None) -> str | None:
    """Name the first line of a file that is not UTF-8, no JSON, or has no text in a column; None if there is none.

    It is only asked when something is wrong: reading lines is slow.
    """
    if file.suffix == ".parquet":
        return None
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            reason = _fault_of(line, column, file.suffix == ".jsonl")
            if reason is not None:
                return f"In {str(file)!r}, line {number:,} {reason}."
    return None


def _fault_of(line: bytes, column: str | None, is_json: bool) -> str | None:
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text) if is_json and text.strip() else None
    except UnicodeDecodeError as error:
        return (
            f"is not UTF-8 (byte {error.start + 1} of it is {error.object[error.start]:#04x}): save the file as UTF-8"
        )
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    if row is None or isinstance(row, list):
        return None
    if not isinstance(row, dict):
        return f"is {type(row).__name__} instead of an object"
    if column is None or isinstance(row.get(column), str):
        return None
    return f"has no {column!r}" if row.get(column) is None else f"has {type(row[column]).__name__} as {column!r}"


def _load_from_hub(dataset: str, dataset_config: str | None, split: str, cache_dir: str | None) -> Dataset:
    require("datasets", f"`dataset={dataset!r}` is no file or folder here: a data set of the hub")
    from datasets import load_dataset

    try:
        return load_dataset(dataset, dataset_config, split=split, cache_dir=cache_dir)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if is_offline() or not is_reachable():
            reason = "it is not in the cache, and the hub can't be reached"
        raise ValueError(
            f"`dataset={dataset!r}` is neither a local file or folder ({_ENDINGS}) nor could it be fetched from the "
            f"Hugging Face hub ({reason}). Give a local path to train without network, for model and tokenizer, too; "
            f"`hf download --repo-type dataset {dataset} --local-dir FOLDER` makes one on a machine with network."
        ) from error


# --- splitting documents by their content -----------------------------------------------------------------------------


def content_hash(text: str) -> int:
    """Return the 64-bit hash of a document, which is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def validation_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Choose the documents with the smallest hashes for validation.

    The choice depends neither on the order of the documents nor on a seed, and equal documents are in the same split.

    Args:
        hashes: `(documents,)` unsigned 64-bit hashes from `content_hash`.
        fraction: Share of the documents, in (0, 1).

    Returns:
        `(documents,)` booleans, true for validation; at least one of each.

    Raises:
        ValueError: If the documents cannot be split.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"`val_fraction={fraction}` must lie between 0 and 1.")
    wanted = max(1, round(len(hashes) * fraction))
    mask = hashes <= np.partition(hashes, wanted - 1)[wanted - 1] if len(hashes) else np.zeros(0, bool)
    if not mask.any() or mask.all():
        raise ValueError(
            f"{len(hashes)} documents ({len(np.unique(hashes))} different ones) cannot be split into training and "
            f"validation with `val_fraction={fraction}`. Give more documents or a smaller fraction."
        )
    return mask
