"""Whether a checkpoint is whole: room to write one, digests of what was written, and a check before one is read.

A file carries its SHA-256 in itself, as the comment of its zip archive, so that copies and renamed ones can be checked;
other programs read it as before. A folder has `memfit_manifest.json`, with size and SHA-256 of every file in it.
"""

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.ledger import held_tensors

MANIFEST = "memfit_manifest.json"
"""The file of a folder with the digests of the others."""

MARKS = ("latest", "meta.pt")
"""Files by which a folder is known to be a checkpoint, of DeepSpeed and of FSDP2."""

_SIGN, _HEX, _CHUNK = b"memfit-sha256:", 64, 1 << 22

_TAIL = 1 << 17
"""Bytes at the end of a file in which the end of its archive is looked for; zip looks half as far."""

_MOST_WRITERS = 100
"""Runs that may write one checkpoint at a time."""

_MOST_BYTES = 255
"""Of a name, on most file systems."""

_MOST_SECONDS = 60.0
"""How long another run may take to put its folder in place, or to remove one."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or something else, or there is no room for a new one."""


# --- writing --------------------------------------------------------------------------------------------------------


def require_room(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin a checkpoint that the file system can't take.

    Raises:
        CheckpointError: With what is needed and what is free.
    """
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise CheckpointError(
            f"There is no room for a checkpoint of {format_bytes(needed_bytes)} in {str(folder)!r}: "
            f"{format_bytes(free)} are free. Nothing was written, and earlier checkpoints stay. Free some space (a new "
            "checkpoint is written beside the one that it replaces), or save elsewhere (`dirpath` of "
            "`ModelCheckpoint`)."
        )


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that the disk is full."""
    return any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in error_chain(error))


def got_full(path: str | Path) -> CheckpointError:
    """The error of a checkpoint for which the disk had no room in the end."""
    return CheckpointError(
        f"The disk got full while {str(path)!r} was written. What was there before is untouched. Free some space and "
        "go on from it."
    )


@contextmanager
def partial_of(target: Path, is_folder: bool) -> Iterator[tuple[Path, int]]:
    """Give an empty file or folder beside a checkpoint's place, `NAME.partial`, which no other run writes to.

    Whoever writes holds a lock on it, which ends with its process: what a killed run has left is used anew, and while
    another run writes a checkpoint of this name there is `NAME.2.partial`.

    Yields:
        Its path and a descriptor; the file is gone afterwards, unless it was renamed.
    """
    for number in range(1, _MOST_WRITERS + 1):
        partial = beside(target, ".partial" if number == 1 else f".{number}.partial")
        descriptor = _own(partial, is_folder)
        if descriptor is not None:
            break
    else:
        raise CheckpointError(
            f"{_MOST_WRITERS} files beside {str(target)!r} are in use, or can't be told from others on this file "
            "system. Save elsewhere (`dirpath` of `ModelCheckpoint`)."
        )
    try:
        yield partial, descriptor
    finally:
        if is_at(partial, descriptor):
            remove(partial)
        os.close(descriptor)


def beside(target: Path, ending: str) -> Path:
    """A name next to a checkpoint's, which is cut where it would be too long; then a digest tells it from others."""
    name = os.fsencode(target.name)
    if len(name) + len(ending) <= _MOST_BYTES:
        return target.with_name(f"{target.name}{ending}")
    ending = f".{hashlib.sha256(name).hexdigest()[:16]}{ending}"
    return target.with_name(name[: _MOST_BYTES - len(ending)].decode(errors="ignore") + ending)


def _own(partial: Path, is_folder: bool) -> int | None:
    """Make, lock and empty a file or folder; None if another run has it."""
    if partial.is_symlink() or (partial.exists() and is_folder and not partial.is_dir()):
        partial.unlink()
    elif partial.is_dir() and not is_folder:
        return None
    if is_folder:
        partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT, 0o666)
    if not locked(descriptor) or not is_at(partial, descriptor):
        os.close(descriptor)
        return None
    if is_folder:
        for path in partial.iterdir():
            remove(path)
    else:
        os.ftruncate(descriptor, 0)
    return descriptor


def locked(descriptor: int, seconds: float = 0.0) -> bool:
    """Lock a file or folder that is open, until it is closed; False if another process has it for longer than this.

    Where there are no locks, that is said once, and it counts as locked.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        except (ImportError, OSError) as error:  # a system or file system without locks, such as some of NFS and Lustre
            _tell_without_locks(str(error))
            return True
        else:
            return True


@functools.cache
def _tell_without_locks(why: str) -> None:
    rank_zero_warn(
        f"The file system of the checkpoints has no locks ({why}). Saving goes on; two runs that write the same "
        "checkpoint at the same time are not kept apart there. Let every run write into a folder of its own."
    )


def own_place(target: Path) -> int | None:
    """Open and lock the folder at a path: another run may be about to put its own there, or to remove this one.

    Returns:
        A descriptor; None for a link.
    """
    for _ in range(_MOST_WRITERS):
        if target.is_symlink():
            break
        descriptor = os.open(target, os.O_RDONLY)
        if not locked(descriptor, _MOST_SECONDS) or is_at(target, descriptor):
            return descriptor
        os.close(descriptor)
    return None


def is_at(path: Path, descriptor: int) -> bool:
    """Whether what is open is what a path leads to."""
    try:
        there, own = path.lstat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def stored_bytes(value: Any) -> int:
    """Bytes that tensors in nested containers take in a file: those of each storage once, and of this rank's parts.

    It is an estimate, and never a reason not to save: tensors of kinds that tell nothing of their memory count as what
    their elements take, or not at all.
    """
    storages: dict[Any, int] = {}
    for tensor in _tensors(value):
        try:
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            for part in held_tensors(own):
                if part.device.type != "meta":
                    storage = part.untyped_storage()
                    storages[storage.data_ptr(), part.device] = storage.nbytes()
        except (RuntimeError, NotImplementedError, AttributeError, TypeError):
            storages[id(tensor), None] = _bytes_of_elements(tensor)
    return sum(storages.values())


def _bytes_of_elements(tensor: Tensor) -> int:
    try:
        return int(tensor.nbytes)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple, set)):
        for entry in value:
            yield from _tensors(entry)


class SignedFile:
    """A file for `torch.save` that ends with the digest of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._end = file, hashlib.sha256(), b""
        self.error: OSError | None = None
        """What writing failed with, which torch reports as something else."""

    def write(self, data: Any) -> int:
        """Write all but the last two bytes, which may turn out to be the length of the archive's comment."""
        given = memoryview(data).cast("B")
        if len(given) < 2:
            joined = self._end + bytes(given)
            self._put(joined[:-2])
            self._end = joined[-2:]
        else:
            self._put(self._end)
            self._put(given[:-2])
            self._end = bytes(given[-2:])
        return len(given)

    def _put(self, data: Any) -> None:
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing: `sign` does it."""

    def sign(self) -> None:
        """Write the digest and wait until the disk has all."""
        if self._end != b"\0\0":
            raise CheckpointError("`torch.save` wrote no zip archive: the digest has no place in it.")
        self._digest.update(self._end)
        comment = _SIGN + self._digest.hexdigest().encode()
        self._file.write(len(comment).to_bytes(2, "little") + comment)
        self._file.flush()
        os.fsync(self._file.fileno())


def seal(folder: Path, share: int, shares: int) -> None:
    """Note digests of a share of a folder's files, and wait until the disk has them; `finish_seal` joins the shares.

    The note has the rank's number among all, since machines that share the folder cut it into the same shares.
    """
    found = {}
    for number, path in enumerate(_files(folder)):
        if number % shares == share:
            found[path.relative_to(folder).as_posix()] = [path.stat().st_size, _digest(path)]
            _sync(path)
    _write_json(folder / f"{MANIFEST}.{max(place()[0], share)}", found)


def finish_seal(folder: Path) -> None:
    """Write the manifest of a folder whose shares are noted, and wait until the disk has it."""
    parts = sorted(folder.glob(f"{MANIFEST}.*"))
    files = {name: entry for part in parts for name, entry in json.loads(part.read_bytes()).items()}
    _write_json(folder / MANIFEST, {"sha256": files, "digest": _of_entries(files)})
    for part in parts:
        part.unlink(missing_ok=True)
    for directory in {path.parent for path in _files(folder)} | {folder}:
        sync_folder(directory)


def _of_entries(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(json.dumps(value, indent=1, sort_keys=True).encode())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the names in a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no such call for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- checking -------------------------------------------------------------------------------------------------------


def verify(path: str | Path) -> None:
    """Check a checkpoint before it is read; all ranks of a run together, each a share of its files.

    Raises:
        CheckpointError: On all ranks, if it is missing, damaged or something else: what is wrong with which file, and
            the last good checkpoint beside it.
    """
    rank, world_size = place()
    found = next((problem for problem in gathered(_problem(Path(path), rank, world_size)) if problem), None)
    if found is None:
        return
    beside = gathered(_last_good_if_any(Path(path)) if rank == 0 else None)[0]
    hint = f"The last good checkpoint there is {str(beside)!r}." if beside else "There is no good checkpoint beside it."
    raise CheckpointError(f"`ckpt_path={str(path)!r}` {found} {hint}")


class PeerError(CheckpointError):
    """Another rank could not write its part of a checkpoint."""


def all_succeed(path: str | Path, action: Callable[[], None] | None = None) -> None:
    """Do something on every rank, and go on when all have; an error on one of them is an error on all.

    Args:
        path: The checkpoint, for messages.
        action: What to do; None waits for the others.

    Raises:
        PeerError: If it has failed on another rank, which it names.
    """
    try:
        if action is not None:
            action()
    except BaseException as error:  # Ctrl-C, too: the others would wait
        tell_peers(error)
        raise
    check_peers(path, gathered(None))


def tell_peers(error: BaseException) -> None:
    """End the others' next `all_succeed`; one that such an end has caused is known already."""
    if not isinstance(error, PeerError):
        gathered(told_by(place()[0], error))


def told_by(rank: int, error: BaseException) -> str:
    """What a rank tells the others of its error."""
    return f"rank {rank} failed in {type(error).__name__}: {error}."


def check_peers(path: str | Path, told: list[Any], cause: BaseException | None = None) -> None:
    """Raise the first error that ranks told each other.

    Args:
        path: The checkpoint, for messages.
        told: What each rank told; None if it has nothing to tell.
        cause: The error itself, if it is known here.

    Raises:
        PeerError: If there is one.
    """
    found = next((words for words in told if words), None)
    if found is not None:
        raise PeerError(f"{str(path)!r} was not saved: {found} What was there before is untouched.") from cause


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


def _last_good_if_any(path: Path) -> Path | None:
    try:
        return last_good(path)
    except Exception:  # a hint must not hide what is wrong, nor leave the other ranks waiting
        return None


def last_good(path: Path) -> Path | None:
    """The newest checkpoint in the folder of another one that is whole."""
    if not path.parent.is_dir():
        return None
    beside = [other for other in path.parent.iterdir() if other != path and other.exists()]  # no links to nothing
    others = [other for other in beside if _looks_like_one(other)]
    for other in sorted(others, key=lambda one: one.stat().st_mtime, reverse=True):
        if _problem(other, 0, 1) is None:
            return other
    return None


def _looks_like_one(path: Path) -> bool:
    if path.suffix in (".partial", ".former"):
        return False
    return any((path / mark).is_file() for mark in MARKS) if path.is_dir() else path.suffix == ".ckpt"


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
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return "is no checkpoint: `torch.save` did not write it."
        file.seek(0, os.SEEK_END)
        size = file.tell()
        signed = size > len(_SIGN) + _HEX + 2
        if signed:
            file.seek(size - len(_SIGN) - _HEX)
            signed = file.read(len(_SIGN)) == _SIGN
            expected = file.read()
        file.seek(max(0, size - _TAIL))
        surplus = None if signed else _surplus(file.read())
    if signed:
        digest = _digest(path, size - len(_SIGN) - _HEX - 2, b"\0\0")
        return None if digest.encode() == expected else "is damaged: its contents have changed since it was written."
    if surplus is not None:
        return f"is damaged: bytes {'follow' if surplus > 0 else 'are missing at'} its end ({abs(surplus):,})."
    if not zipfile.is_zipfile(path):
        return f"is cut off after {size} bytes: the end of its archive is missing."
    try:
        with zipfile.ZipFile(path) as archive:
            foreign = _foreign(archive.namelist())
            if foreign is not None:
                return foreign
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        return f"is damaged: {error}."
    return None if damaged is None else f"is damaged: the checksum of {damaged!r} in it is another."


def _surplus(tail: bytes) -> int | None:
    """How many bytes follow the comment of an archive of ours (negative: are missing of it); None if there is none.

    Args:
        tail: The last bytes of a file that doesn't end with a digest.
    """
    length = len(_SIGN) + _HEX
    for found in re.finditer(rb"PK\x05\x06.{16}" + re.escape(length.to_bytes(2, "little")), tail, re.DOTALL):
        rest = tail[found.end() :]
        if rest[: len(_SIGN)] == _SIGN[: len(rest)]:
            return len(rest) - length
    return None


def _foreign(names: list[str]) -> str | None:
    """What an archive is that `torch.save` did not write, by the names in it, as the end of a sentence."""
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner:
        return (
            "is no checkpoint: it is a TorchScript archive (`torch.jit.save`), which holds a program. Give a `.ckpt` "
            "file that `Trainer.save_checkpoint` or `torch.save` wrote."
        )
    return None if "data.pkl" in inner else "is no checkpoint: it is a zip archive that `torch.save` did not write."


def refuse_foreign(path: Path) -> None:
    """Refuse a zip archive that `torch.save` did not write, of which torch's errors name no file.

    Raises:
        CheckpointError: If it is one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            foreign = _foreign(archive.namelist())
    except zipfile.BadZipFile:  # damaged, or of an earlier kind
        return
    if foreign is not None:
        raise CheckpointError(f"{str(path)!r} {foreign}")


def within(folder: Path, name: str) -> Path:
    """A file or folder of a checkpoint's folder, by the name under which one of its files speaks of it.

    Raises:
        CheckpointError: If it lies elsewhere, where no digest vouches for it.
    """
    named = Path(name)
    if named.is_absolute() or ".." in named.parts:
        raise CheckpointError(f"`ckpt_path={str(folder)!r}` names a file that is not in it: {name!r}.")
    return folder / named


def _problem_of_folder(folder: Path, rank: int, world_size: int) -> str | None:
    if not _looks_like_one(folder):
        return "is no checkpoint: the folder has neither `latest` (ZeRO) nor `meta.pt` (FSDP2)."
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return None  # of Lightning's own strategy, or of an earlier version
    try:
        written = json.loads(manifest.read_bytes())
        files, digest = written["sha256"], written["digest"]
    except (ValueError, KeyError, TypeError):
        return f"is damaged: {MANIFEST!r} can't be read."
    if digest != _of_entries(files):
        return f"is damaged: {MANIFEST!r} has changed since it was written."
    for number, (name, (size, expected)) in enumerate(sorted(files.items())):
        path = folder / name
        if not path.is_file():
            return f"is not whole: {name!r} is missing."
        if path.stat().st_size != size:
            return f"is damaged: {name!r} has {path.stat().st_size} bytes instead of {size}."
        if number % world_size == rank and _digest(path) != expected:
            return f"is damaged: {name!r} has changed since it was written."
    return None


def _digest(path: Path, size: int | None = None, end: bytes = b"") -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in _chunks(file, path.stat().st_size if size is None else size):
            digest.update(chunk)
    digest.update(end)
    return digest.hexdigest()


def _chunks(file: IO[bytes], size: int) -> Iterable[bytes]:
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            return
        size -= len(chunk)
        yield chunk
