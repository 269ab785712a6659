"""Whether a checkpoint is whole: written beside its place, synced, renamed, and checked before it is read.

A file is a zip archive with a checksum of every entry, which `torch.load` doesn't look at. A folder has
`memfit_manifest.json`, with size and SHA-256 of every file in it.
"""

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

MANIFEST = "memfit_manifest.json"
"""The file of a folder with the digests of the others."""

ZERO_MARK, FSDP2_MARK = "latest", "meta.pt"
"""Files by which a folder is known to be a checkpoint, of DeepSpeed and of FSDP2; each is written last."""

_CHUNK = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or something else, or there is no room for a new one."""


# --- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def replacing_file(target: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to, which takes the place of `target` once the disk has all of it.

    Raises:
        CheckpointError: If it could not be written, or a folder is there. What was there before stays.
    """
    if target.is_dir() and not target.is_symlink():
        raise CheckpointError(f"{str(target)!r} is a folder, and is not overwritten by a file. Name another.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    remove(partial)
    with _cleaned_up(target, partial), partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        partial.replace(target)
    _sync(target.parent)


@contextmanager
def replacing_folder(path: str | Path, mark: str) -> Iterator[Path]:
    """Give a folder beside `path` to write to, which takes its place once the disk has everything, digests included.

    All ranks enter and leave together, and see the same folder. An earlier checkpoint, which has the file `mark`, stays
    until then, and is moved to `<path>.former` for the moment between two renames.

    Raises:
        FileExistsError: If something other than such a checkpoint is at `path`.
        CheckpointError: If it is at a URL, on one of several machines alone, or could not be written.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"`filepath={path}`: each rank writes a file of its own into a checkpoint's folder, which is done on this "
            "machine only. Name a folder that is mounted here."
        )
    target, (rank, world_size) = Path(path), place()
    partial, former = (target.with_name(f"{target.name}.{ending}") for ending in ("partial", "former"))
    if target.exists() and not (target / mark).is_file():
        raise FileExistsError(
            f"{str(target)!r} is not a checkpoint of this strategy (a folder with {mark!r}), and is not overwritten. "
            "Name another."
        )
    gathered(None)  # no rank writes before all have looked
    if rank == 0:
        if former.exists() and not target.exists():  # a run that ended between the two renames
            former.rename(target)
        remove(partial)
        partial.mkdir(parents=True)
    gathered(None)
    sees = gathered(partial.is_dir())
    if False in sees:
        raise CheckpointError(
            f"`filepath={path}`: rank {sees.index(False)} doesn't see this folder, of which the first rank has made "
            "one. Name a folder that all machines share."
        )
    with _cleaned_up(target, partial, is_first=rank == 0):
        yield partial
        gathered(None)  # all have written
        names = gathered(sorted(map(str, _files(partial))) if rank == 0 else None)[0]
        own = {
            name: [(partial / name).stat().st_size, _synced_digest(partial / name)] for name in names[rank::world_size]
        }
        files = {name: entry for found in gathered(own) for name, entry in found.items()}
        if rank == 0:
            with (partial / MANIFEST).open("w") as file:
                json.dump({"sha256": files}, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            for folder in {(partial / name).parent for name in names} | {partial}:
                _sync(folder)
            if os.path.lexists(target):
                remove(former)
                target.rename(former)
            partial.rename(target)
            _sync(target.parent)
            remove(former)
        gathered(None)


@contextmanager
def _cleaned_up(target: Path, partial: Path, is_first: bool = True) -> Iterator[None]:
    """Leave nothing of what couldn't be written."""
    try:
        yield
    except BaseException as error:
        if is_first:
            remove(partial)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"{str(target)!r} could not be written ({error}), as on a full disk. What was there before is untouched."
        ) from error


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _digest(path)


def _sync(folder: Path) -> None:
    """Wait until the disk knows the names in a folder, where there is such a call for folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- checking -------------------------------------------------------------------------------------------------------


def verify(path: str | Path, is_alone: bool = False) -> None:
    """Check a checkpoint before it is read; all ranks of a run together, each a share of its files, or one alone.

    Raises:
        CheckpointError: On all ranks, if it is missing, damaged or something else: what is wrong with which file, and
            the last good checkpoint beside it.
    """
    rank, world_size = (0, 1) if is_alone else place()
    problem = _problem(Path(path), rank, world_size)
    found = next((one for one in ([problem] if is_alone else gathered(problem)) if one), None)
    if found is None:
        return
    own = last_good(Path(path)) if rank == 0 else None
    beside = own if is_alone else gathered(own)[0]
    hint = f"The last good checkpoint there is {str(beside)!r}." if beside else "There is no good checkpoint beside it."
    raise CheckpointError(f"`ckpt_path={str(path)!r}` {found} {hint}")


def gathered(value: Any) -> list[Any]:
    """The value of every rank; of this process alone where there are no others."""
    _, world_size = place()
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def place() -> tuple[int, int]:
    """Number of this rank, and how many there are."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def last_good(path: Path) -> Path | None:
    """The newest checkpoint in the folder of another one that is whole; None if there is none, or it can't be told."""
    with suppress(OSError):
        others = [one for one in path.parent.iterdir() if one != path and one.exists() and _looks_like_one(one)]
        for other in sorted(others, key=lambda one: one.stat().st_mtime, reverse=True):
            if _problem(other, 0, 1) is None:
                return other
    return None


def is_sharded(path: str | Path) -> bool:
    """Whether there is a checkpoint folder of a sharded strategy at a path."""
    return any((Path(path) / mark).is_file() for mark in (ZERO_MARK, FSDP2_MARK))


def _looks_like_one(path: Path) -> bool:
    return path.suffix != ".partial" and (is_sharded(path) if path.is_dir() else path.suffix == ".ckpt")


def _problem(path: Path, rank: int, world_size: int) -> str | None:
    """What is wrong with a checkpoint, as the end of a sentence; None if nothing is, in this rank's share of it."""
    try:
        if path.is_dir():
            return _problem_of_folder(path, rank, world_size)
        if not path.exists():
            return "doesn't exist."
        return _problem_of_file(path) if rank == 0 else None
    except OSError as error:
        return f"can't be read: {error.strerror or error}."
    except Exception as error:  # such as zipfile's of a flag that has changed; other ranks wait for an answer
        return f"is damaged: {error}."


def _problem_of_file(path: Path) -> str | None:
    if not path.stat().st_size:
        return "is empty: the run that wrote it ended too early."
    if not zipfile.is_zipfile(path):
        return "is cut off, or no checkpoint: its end is not that of a file of `torch.save`."
    with zipfile.ZipFile(path) as archive:
        if "data.pkl" not in {name.partition("/")[2] for name in archive.namelist()}:
            return "is no checkpoint: it is a zip archive that `torch.save` did not write."
        damaged = archive.testzip()
    return None if damaged is None else f"is damaged: the checksum of {damaged!r} in it is another."


def _problem_of_folder(folder: Path, rank: int, world_size: int) -> str | None:
    if not is_sharded(folder):
        return f"is no checkpoint: the folder has neither {ZERO_MARK!r} (ZeRO) nor {FSDP2_MARK!r} (FSDP2)."
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return None  # of Lightning's own strategy
    try:
        files = [(name, *entry) for name, entry in sorted(json.loads(manifest.read_bytes())["sha256"].items())]
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"is damaged: {MANIFEST!r} can't be read."
    for number, (name, size, expected) in enumerate(files):
        path = folder / name
        if not path.is_file():
            return f"is not whole: {name!r} is missing."
        if path.stat().st_size != size:
            return f"is damaged: {name!r} has {path.stat().st_size} bytes instead of {size}."
        if number % world_size == rank and _digest(path) != expected:
            return f"is damaged: {name!r} has changed since it was written."
    return None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
