"""Where text comes from: local files, or a data set of the hub through Hugging Face `datasets`.

Without `datasets`, which is an extra, txt, jsonl and json files are read here (`PlainDocuments`).

The files are read as one document per row; `validation_mask` splits documents into training and validation by content.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.device.host import probe_host
from lightning_memfit.extras import how_to_install, is_installed, require
from lightning_memfit.hub import is_offline, is_reachable
from lightning_memfit.memory.cache_files import checksum, default_cache_folder, read_entry, write_entry
from lightning_memfit.memory.units import format_bytes

if TYPE_CHECKING:
    from datasets import Dataset

Documents: TypeAlias = "Dataset | PlainDocuments"
"""Rows of a data set. Data modules import this name: for a recipe, jsonargparse runs what their own files import for
annotations alone, and `datasets` takes half a second."""

# A byte order mark, which editors put at the beginning of a file, is no part of the text.
_UTF8 = "utf-8-sig"
# File endings, with the reader in `datasets` and its options. A text file is one document.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document", "encoding": _UTF8}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
# A .json file is one list, read into memory here. It is named itself: those in folders are rarely the data.
_LIST = ".json"
_ENDINGS = ", ".join(_READERS)

MAPPED = f"With `datasets` they are mapped from disk instead: {how_to_install('datasets')}"
"""What to do where files are read into host memory."""

_Item = TypeVar("_Item")
_IN_PARTS = "Divide it into several files, or into the lines of a jsonl file."


class NoRoomError(ValueError):
    """What is read is more than host memory has room for."""


class HostRoom:
    """Counts what is read into host memory, and refuses more than was free in the beginning.

    Args:
        what: What is read, in words.
        fix: What to do where it is too much, as a sentence.
    """

    _SHARE = 0.1
    """Of the free memory, from which on it is said."""

    def __init__(self, what: str, fix: str) -> None:
        self._what, self._fix = what, fix
        self._free, self._taken = probe_host().available_bytes, 0

    def take(self, size_bytes: int) -> None:
        """Count some more.

        Raises:
            NoRoomError: If it is too much.
        """
        self._taken += size_bytes
        if self._taken > self._free:
            raise NoRoomError(f"{self._what} take more than the {self._of_free()}. {self._fix}")

    def tell(self) -> None:
        """Say how much was read, if it is much."""
        if self._taken > self._SHARE * self._free:
            taken = format_bytes(self._taken)
            rank_zero_warn(f"{self._what} take {taken} in every process, of the {self._of_free()}. {self._fix}")

    def _of_free(self) -> str:
        return f"{format_bytes(self._free)} of host memory that were free"


class PlainDocuments:
    """Rows of local txt, jsonl and json files, read anew whenever they are gone through, one at a time.

    It is as much of a `datasets.Dataset` as is needed here.

    Args:
        files: From `local_files`.

    Raises:
        ValueError: If a file can't be read.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._length = 0
        self._texts: dict[str, _Texts] = {}
        for row in self:
            for name, value in row.items():
                texts = self._texts.setdefault(name, _Texts())
                if isinstance(value, str):
                    texts.unbroken += texts.unbroken == self._length
                    texts.count += 1
            self._length += 1
        self.column_names = sorted(self._texts)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self._files:
            try:
                yield from _rows(file)
            except NoRoomError:
                raise
            except ValueError as error:
                reason = _fault_in(file) or str(error)
                raise ValueError(f"`dataset`: the file {str(file)!r} cannot be read: {reason}") from error

    def __getitem__(self, column: str) -> list[Any]:
        room, values = HostRoom(f"`dataset`: without `datasets`, the texts of {column!r}", MAPPED), []
        for row in self:
            values.append(row.get(column))
            room.take(sys.getsizeof(values[-1]))
        room.tell()
        return values

    def without_text(self, column: str) -> tuple[int, int]:
        """How many rows have no text in a column, and the number of the first of them."""
        texts = self._texts[column]
        return self._length - texts.count, texts.unbroken + 1


@dataclass
class _Texts:
    """Rows that have text in a column: all of them, and those before the first one without."""

    count: int = 0
    unbroken: int = 0


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """The documents of a file, one at a time.

    Raises:
        ValueError: If the file isn't UTF-8, or a line no JSON.
    """
    if _ending(file) == ".txt":
        room = HostRoom(f"`dataset`: the bytes and letters of {str(file)!r}, one document,", _IN_PARTS)
        room.take(2 * file.stat().st_size)
        yield {"text": file.read_text(encoding=_UTF8)}
        return
    if _ending(file) == _LIST:
        room = HostRoom(f"`dataset`: the bytes and objects of {str(file)!r}, one list,", _IN_PARTS)
        room.take(2 * file.stat().st_size)
        yield from _objects(json.loads(file.read_text(encoding=_UTF8), object_pairs_hook=_once))
        return
    with file.open(encoding=_UTF8) as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = _object_of(line) if line.strip() else {}
            except ValueError as error:
                raise ValueError(f"line {number:,} {error}") from error
            if row:
                yield row


def _object_of(text: str) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        ValueError: With what the line is or has instead, as the end of a sentence.
    """
    try:
        row = json.loads(text, object_pairs_hook=_once)
    except _TwiceError as error:
        raise ValueError(f"has {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__} instead of an object")
    half = _half_of_pair(row) if "\\u" in text else None
    if half is not None:
        raise ValueError(f"has {half}")
    return row


class _TwiceError(ValueError):
    """An object has a key twice, of which a reader would take either value."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _half_of_pair(value: Any) -> str | None:
    """Name half a surrogate pair in a text, which is no character and can't be written; None if there is none."""
    if isinstance(value, str):
        found = next((letter for letter in value if "\ud800" <= letter <= "\udfff"), None)
        return None if found is None else f"half a character (\\u{ord(found):x}, a lone surrogate) in a text"
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for one in inner if (found := _half_of_pair(one))), None)


def _read_plainly(path: Path) -> PlainDocuments:
    """Read txt, jsonl and json files without `datasets`.

    Raises:
        ModuleNotFoundError: If the files are of another kind.
        ValueError: If a file can't be read.
    """
    files = local_files(path)
    if _ending(files[0]) not in (".txt", ".jsonl", _LIST):
        require("datasets", f"`dataset={str(path)!r}`: reading {_ending(files[0])} files")
    return PlainDocuments(files)


def _objects(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError("it is no list of objects; one object on each line makes a .jsonl file")
    for number, row in enumerate(found, 1):
        half = _half_of_pair(row)
        if half is not None:
            raise ValueError(f"object {number:,} has {half}")
    return found


def load_documents(dataset: str, dataset_config: str | None, split: str, cache_dir: str | None) -> Documents:
    """Return a data set with one document per row.

    Args:
        dataset: Local file or folder of txt, jsonl or parquet files, a json file, or a hub name.
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
        plainly = _ending(path) == _LIST or not is_installed("datasets")
        return _read_plainly(path) if plainly else _load_files(path, cache_dir)
    if path.is_symlink():
        raise ValueError(f"`dataset={dataset!r}` is a link to {str(path.readlink())!r}, which is not there. Mend it.")
    if dataset.startswith((".", "/", "~")) or _ending(path) in (*_READERS, _LIST) or dataset.count("/") > 1:
        raise ValueError(f"`dataset={dataset!r}` is a path, but there is no such file or folder.")
    return _load_from_hub(dataset, dataset_config, split, cache_dir)


def _load_files(path: Path, cache_dir: str | None) -> Dataset:
    from datasets import load_dataset

    files = local_files(path)
    reader, options = _READERS[_ending(files[0])]
    names = [str(file) for file in files]
    if reader == "parquet":
        for file in files:
            _check_parquet(file)
    try:
        return load_dataset(reader, data_files={"train": names}, split="train", cache_dir=cache_dir, **options)
    except Exception as error:
        place = next((found for look in (_fault_in, _change_in) for file in files if (found := look(file))), "")
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
    files = [path] if path.is_file() else files_below(path, _READERS)
    kinds = sorted({_ending(file) for file in files})
    if not files or kinds[0] not in (*_READERS, _LIST):
        raise ValueError(f"`dataset={str(path)!r}` has no text files. Wanted: {_ENDINGS}, or a .json file itself.")
    if len(kinds) > 1:
        raise ValueError(f"`dataset={str(path)!r}` mixes {', '.join(kinds)} files. Keep one kind in a folder.")
    for file in files:
        if _size_of(file) == 0:
            raise ValueError(f"`dataset`: the file {str(file)!r} is empty. Remove it or fill it.")
        if _ending(file) == ".jsonl" and _is_blank(file):
            raise ValueError(f"`dataset`: the file {str(file)!r} has blank lines only. Remove it or fill it.")
    return files


def files_below(folder: Path, endings: Collection[str]) -> list[Path]:
    """Return the files below a folder with some endings, in small or capital letters, sorted.

    Links to folders are followed, but for one that leads back to a folder around it. Hidden files, and those in hidden
    folders, are left out, as `datasets` does: they are copies of others (`.ipynb_checkpoints`), or no data in spite of
    their ending (macOS's `._1.jpg`). A warning names them, and files with other endings that are not hidden.

    Args:
        folder: The folder.
        endings: Such as `.txt`, in small letters.

    Raises:
        ValueError: If a folder or one of the files can't be read.
    """
    files: list[Path] = []
    others: dict[str, list[Path]] = {}
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while waiting:
        place, around = waiting.pop()
        try:
            state = place.stat()
            with os.scandir(place) as entries:
                children = [(place / entry.name, entry.is_dir()) for entry in entries]
        except OSError as error:
            raise _unreadable("folder", place, error) from error
        own = (state.st_dev, state.st_ino)
        if own in around:
            continue
        for path, is_folder in children:
            if is_folder:
                waiting.append((path, around | {own}))
                continue
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if _ending(path) in endings and not hidden:
                _size_of(path)
                files.append(path)
            elif _ending(path) in endings or not hidden:
                kind = "hidden" if hidden else _ending(path)
                others.setdefault(kind, []).append(path)
    if others:
        found = ", ".join(
            f"{len(others[kind]):,} {kind or 'without an ending'} (such as {min(others[kind]).name!r})"
            for kind in sorted(others)
        )
        rank_zero_warn(f"`dataset={str(folder)!r}`: of its files only {', '.join(endings)} are read, not {found}.")
    return sorted(files)


def _ending(path: Path) -> str:
    return path.suffix.lower()


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:  # a link whose target is gone
        raise _unreadable("file", file, error) from error


def _unreadable(kind: str, path: Path, error: OSError) -> ValueError:
    return ValueError(f"`dataset`: the {kind} {str(path)!r} can't be read: {error.strerror}. Remove it or mend it.")


def _is_blank(file: Path) -> bool:
    with file.open("rb") as lines:
        return not any(line.strip(b"\xef\xbb\xbf \t\r\n") for line in lines)


def check_texts(documents: Documents, column: str, argument: str, dataset: str = "") -> None:
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


def _fault_of_column(documents: Documents, column: str) -> str:
    """What a column has besides text, in words; empty if it has nothing else."""
    if isinstance(documents, PlainDocuments):
        wrong, first = documents.without_text(column)
        if not wrong:
            return ""
        count = f"{wrong:,} of {len(documents):,} documents have no text"
        return f"{count}, number {first:,} the first of them. Fill them in or remove them"
    kind = getattr(documents.features[column], "dtype", None)
    values = documents.data.column(column)
    if values.null_count:
        first = values.is_null().to_numpy().argmax() + 1
        count = f"{values.null_count:,} of {len(values):,} documents have no value"
        return f"{count}, number {first:,} the first of them. Fill them in or remove them"
    if kind not in ("string", "large_string"):
        return str(documents.features[column])
    return "" if _is_utf8(documents, column) else "bytes that are not UTF-8"


def _is_utf8(documents: Dataset, column: str) -> bool:
    """Whether all texts of a column are UTF-8. That all were is kept in the cache: looking reads the whole column."""
    from pyarrow import ArrowInvalid

    files = [(name, os.stat(name)) for name in sorted(file["filename"] for file in documents.cache_files)]
    stamp = [documents._fingerprint, column, [(name, one.st_size, one.st_mtime_ns) for name, one in files]]
    entry = default_cache_folder() / "texts" / f"{checksum(stamp)[:24]}.json"
    if files and read_entry(entry) is not None:
        return True
    try:
        documents.data.column(column).validate(full=True)
    except ArrowInvalid:
        return False
    if files:  # what is in memory only has no stamp
        write_entry(entry, {"column": column, "documents": len(documents)})
    return True


def _fault_in(file: Path, column: str | None = None) -> str | None:
    """Name the first line of a file that is not UTF-8, no JSON, or has no text in a column; None if there is none.

    It is only asked when something is wrong: reading lines is slow.
    """
    if _ending(file) in (".parquet", _LIST):
        return None
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            reason = _fault_of(line, column, _ending(file) == ".jsonl")
            if reason is not None:
                return f"In {str(file)!r}, line {number:,} {reason}."
    return None


def _change_in(file: Path) -> str | None:
    """Name the first line of a file of JSON that has another type in a column than the lines before; None if none has.

    Columns have one type each, and some versions of `datasets` read none of the file then.
    """
    if _ending(file) != ".jsonl":
        return None
    known: dict[str, tuple[str, int]] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line) if line.strip() else None
            for column, value in _columns(row if isinstance(row, dict) else {}):
                kind = "number" if type(value) in (int, float) else type(value).__name__
                before, first = known.setdefault(column, (kind, number)) if value is not None else (kind, number)
                if kind != before:
                    words = f"has {type(value).__name__} as {column!r}, where line {first:,} has {before}"
                    return f"In {str(file)!r}, line {number:,} {words}."
    return None


def _columns(row: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values of an object, and of what is in them, with their names: `messages`, `messages[]`, `messages[].role`.

    All that is in a list is of one type, as in a column.
    """
    for name, value in row.items():
        waiting = [(f"{above}{name}", value)]
        while waiting:
            path, one = waiting.pop()
            yield path, one
            if isinstance(one, dict):
                yield from _columns(one, f"{path}.")
            elif isinstance(one, list):
                waiting += [(f"{path}[]", item) for item in reversed(one)]


def _fault_of(line: bytes, column: str | None, is_json: bool) -> str | None:
    try:
        text = line.decode(_UTF8)
    except UnicodeDecodeError as error:
        return (
            f"is not UTF-8 (byte {error.start + 1} of it is {error.object[error.start]:#04x}): save the file as UTF-8"
        )
    if not is_json or not text.strip():
        return None
    try:
        row = _object_of(text)
    except ValueError as error:
        return None if _is_list_of_objects(text) else str(error)
    if column is None or isinstance(row.get(column), str):
        return None
    return f"has no {column!r}" if row.get(column) is None else f"has {type(row[column]).__name__} as {column!r}"


def _is_list_of_objects(text: str) -> bool:
    """Whether a line is a list of objects, which `datasets` reads as well."""
    if not text.lstrip().startswith("["):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(found) and all(isinstance(row, dict) for row in found)


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
    encoded = text.encode("utf-8", "surrogateescape")  # names of files may be in another encoding
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


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


def split_by_content(
    items: Sequence[_Item], content_of: Callable[[_Item], str], fraction: float
) -> tuple[list[_Item], list[_Item]]:
    """Split items as `validation_mask` does; those of equal content fall on the same side.

    Args:
        items: What is split.
        content_of: The text by which an item is split.
        fraction: Share of the items kept for validation, in (0, 1).

    Returns:
        Items for training and for validation, each in their order.

    Raises:
        ValueError: If the items cannot be split.
    """
    mask = validation_mask(np.array([content_hash(content_of(item)) for item in items], np.uint64), fraction)
    chosen = list(zip(items, mask, strict=True))
    return [item for item, is_val in chosen if not is_val], [item for item, is_val in chosen if is_val]
