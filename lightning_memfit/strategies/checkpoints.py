"""Checkpoints of all strategies: folders replaced as a whole, and any checkpoint read in one form.

`rewritten` never leaves half a checkpoint; `read_run` reads what any strategy wrote; `consolidated` joins the shards of
ZeRO or FSDP2.
"""

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial as partial_function
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.memory.state_dicts import versions_of
from lightning_memfit.strategies.integrity import (
    CheckpointError,
    all_succeed,
    beside,
    finish_seal,
    gathered,
    got_full,
    is_full,
    own_place,
    partial_of,
    place,
    remove,
    require_room,
    seal,
    sync_folder,
    tell_peers,
)
from lightning_memfit.strategies.safe_loading import load
from lightning_memfit.strategies.saved_run import SavedRun, owned, pieces_of
from lightning_memfit.strategies.shards import META, read_shards
from lightning_memfit.strategies.upstream.deepspeed import ZERO_MARK as ZERO_MARK
from lightning_memfit.strategies.upstream.deepspeed import read_zero

FSDP2_MARK = META
"""A file by which a folder is known to be such a checkpoint, as `ZERO_MARK` is; each is written last."""


@contextmanager
def rewritten(
    path: str | Path,
    is_writer: bool,
    barrier: Callable[[], None],
    mark: str = ZERO_MARK,
    needed_bytes: int = 0,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Path]:
    """Give a folder next to `path` to write to, which replaces `path` once the disk has everything, digests included.

    All ranks enter and leave together. An earlier checkpoint at `path` stays until then: the two change places in one
    call where the system has it (Linux), elsewhere in two. A run that dies in between leaves it untouched, together
    with a folder `<path>.partial`, which the next save replaces. Two runs may write to one place: each has a folder of
    its own, and the last is there in the end. A link at `path` is replaced, and what it leads to stays. What fails on
    one rank ends all of them.

    Args:
        path: Where the checkpoint is to be.
        is_writer: Whether this rank moves folders: one per machine.
        barrier: Waits for all ranks.
        mark: A file that every checkpoint of this kind has, `ZERO_MARK` or `FSDP2_MARK`.
        needed_bytes: What this rank is going to write.
        share: Number of this rank, and how many there are, among those that see the folder: each digests some files.

    Raises:
        FileExistsError: If something other than such a checkpoint is at `path`.
        CheckpointError: If it is at a URL, if there is no room for it, or if the disk gets full meanwhile.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"`filepath={path}`: each rank writes a file of its own into a checkpoint's folder, which is done on this "
            "machine only. Name a folder that is mounted here."
        )
    target = Path(path)
    if target.exists() and not (target / mark).is_file():
        raise FileExistsError(
            f"{str(target)!r} is not a checkpoint of this strategy (a folder with {mark!r}), and is not overwritten. "
            "Name another."
        )
    barrier()  # no rank writes before all have looked
    _require_room_for_all(target.parent, needed_bytes)
    with ExitStack() as stack:
        partial = _begin(target, is_writer, stack)
        try:
            try:
                yield partial
            except BaseException as error:  # Ctrl-C, too: the others would wait
                tell_peers(error)
                raise
            all_succeed(path)  # no rank digests files before all have written theirs
            all_succeed(path, lambda: seal(partial, *share) if partial.exists() else None)
            for is_turn in _turns(is_writer):
                is_there = is_turn and partial.exists()  # another machine may share the folder and have had its turn
                all_succeed(path, partial_function(_put_in_place, partial, target, stack) if is_there else None)
        except BaseException as error:
            if is_full(error):
                raise got_full(path) from error
            raise


def _begin(target: Path, is_writer: bool, stack: ExitStack) -> Path:
    """Make the folder to write to: the first rank chooses its name, and the first of other machines use it, too."""
    found: list[Path] = []

    def choose() -> None:
        found.append(stack.enter_context(partial_of(target, is_folder=True))[0])

    all_succeed(target, choose if place()[0] == 0 else None)
    partial = Path(gathered(found[0] if found else None)[0])

    def follow() -> None:
        if not partial.is_dir():  # on a machine that doesn't share the folder
            partial.mkdir(parents=True, exist_ok=True)  # a shared folder may be seen late
            stack.callback(shutil.rmtree, partial, ignore_errors=True)

    all_succeed(target, follow if is_writer and not found else None)
    return partial


def _put_in_place(partial: Path, target: Path, stack: ExitStack) -> None:
    """Let a folder whose shares are sealed take the place of an earlier one."""
    finish_seal(partial)
    former = beside(target, ".former")
    remove(former)
    if not os.path.lexists(target):
        with suppress(OSError):  # another run may have put one there since
            partial.rename(target)
            sync_folder(target.parent)
            return
    old = own_place(target)
    if old is not None:
        stack.callback(os.close, old)  # it is about to have the name of a folder that others may write to
    if not _exchanged(partial, target):
        target.rename(former)
        partial.rename(target)
    sync_folder(target.parent)
    try:
        remove(partial)
        remove(former)
    except OSError as error:  # the new one is in its place; files of the old one may be in use
        rank_zero_warn(f"The checkpoint that {str(target)!r} replaced can't be removed: {error}.")
    sync_folder(target.parent)


def _turns(is_writer: bool) -> list[bool]:
    """For each rank that moves folders, in their order, whether it is this one: machines may share the folder."""
    rank, writers = place()[0], gathered(is_writer)
    return [number == rank for number, writes in enumerate(writers) if writes]


def _require_room_for_all(folder: Path, needed_bytes: int) -> None:
    """Check on every rank for what all of them are going to write; an error on one is an error on all."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    total, errors = sum(gathered(needed_bytes)), []
    try:
        require_room(existing, total)
    except CheckpointError as error:
        errors.append(str(error))
    found = [message for messages in gathered(errors) for message in messages]
    if found:
        raise CheckpointError(found[0])


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places at once, by `renameat2(2)`; False where that call is missing."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(exchange)) == 0)


def read_run(path: str | Path, weights_only: bool | None = None) -> SavedRun:
    """Read the checkpoint of any strategy, or of a run on one device.

    Args:
        path: A file, or a folder that FSDP2 or DeepSpeed wrote.
        weights_only: False makes whatever is in it, and runs what is hidden there.

    Raises:
        ValueError: If it is no checkpoint.
        UnsafeCheckpointError: If it holds more than tensors and plain values.
    """
    root = Path(path)
    if (root / ZERO_MARK).is_file():
        saved = read_zero(root, weights_only)
        saved.extras = owned(saved.extras)
        return saved
    if (root / FSDP2_MARK).is_file():
        return read_shards(root, weights_only)
    if root.is_file():
        saved = run_of(load(root, weights_only), root)
        saved.extras = owned(saved.extras)
        return saved
    raise CheckpointError(
        f"`ckpt_path={str(path)!r}` is no checkpoint: neither a file, nor a folder with `latest` (ZeRO) or `meta.pt` "
        "(FSDP2)."
    )


def run_of(read: Any, path: str | Path) -> SavedRun:
    """What a file of a run on one device, or under DDP, was read to; its tensors are shared.

    Args:
        read: As Lightning made it, from `torch.load` or a plugin.
        path: The checkpoint, for messages.

    Raises:
        CheckpointError: If it is something else.
    """
    if not isinstance(read, dict) or not isinstance(read.get("state_dict"), dict):
        raise CheckpointError(f"`ckpt_path={str(path)!r}` is no checkpoint of Lightning: it has no `state_dict`.")
    extras = {key: value for key, value in read.items() if key not in ("state_dict", "optimizer_states")}
    weights = {name: pieces_of(value) for name, value in read["state_dict"].items()}
    versions = versions_of(read["state_dict"]) or {}  # a plain dict is one of no versions to torch
    return SavedRun(Path(path), weights, extras, read.get("optimizer_states"), versions=versions)


def consolidated(folder: str | Path) -> dict[str, Any]:
    """Read the checkpoint folder of a ZeRO strategy or of FSDP2 as if it were the file of a run on one device.

    ZeRO's weights come from the optimizer's fp32 master weights. This needs host memory for all of them; optimizer
    states are left out. Saved with `torch.save`, the result can be loaded with `load_from_checkpoint`,
    `load_full_weights`, and `memfit export`.

    Args:
        folder: The folder that `Trainer.save_checkpoint` wrote.

    Returns:
        `state_dict` and everything else that Lightning and the module saved.

    Raises:
        ValueError: If the folder is not such a checkpoint.
    """
    if not is_sharded(folder):
        raise ValueError(
            f"{str(folder)!r} is no sharded checkpoint: it has neither `latest` (ZeRO) nor `meta.pt` (FSDP2)."
        )
    saved = read_run(folder)
    saved.optimizers = None
    return saved.checkpoint()


def is_sharded(path: str | Path) -> bool:
    """Whether there is a checkpoint folder of a sharded strategy at a path."""
    return any((Path(path) / mark).is_file() for mark in (ZERO_MARK, FSDP2_MARK))
