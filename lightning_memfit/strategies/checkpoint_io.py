"""`AtomicCheckpointIO`: checkpoints in one file that are whole or absent, checked before they are read."""

from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_memfit.strategies.checkpoints import is_sharded, read_run, run_of
from lightning_memfit.strategies.integrity import (
    CheckpointError,
    SignedFile,
    got_full,
    is_full,
    partial_of,
    require_room,
    stored_bytes,
    sync_folder,
    verify,
)
from lightning_memfit.strategies.safe_loading import refusing
from lightning_memfit.strategies.saved_run import SavedRun


class AtomicCheckpointIO(CheckpointIO):
    """Write a checkpoint beside its place and rename it when the disk has all of it; check it before it is read.

    A run that is killed or finds the disk full leaves the checkpoint that was there. A disk that is too small is
    noticed before anything is written. The file carries its SHA-256, so that one flipped bit is found when it is
    loaded, and only tensors and plain values are loaded. Folders of sharded strategies load as well, put together in
    memory.

    The strategies of this package and `memfit fit` use it by themselves. With any other:
    `Trainer(plugins=[AtomicCheckpointIO()])`. Paths that are not local (`s3://...`) are left to Lightning's own plugin.

    Args:
        verify: Check digests before loading, which reads the file once more.
    """

    def __init__(self, verify: bool = True) -> None:
        self.verify = verify
        self._remote = TorchCheckpointIO()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a file; an existing one stays until the new one is whole. A link is replaced, not what it leads to.

        Raises:
            CheckpointError: If the disk is too small, or gets full meanwhile.
        """
        if "://" in str(path):
            self._remote.save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("`storage_options` is for paths that are not local: leave it out.")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            raise CheckpointError(f"{str(path)!r} is a folder, and is not overwritten by a file. Name another.")
        require_room(target.parent, stored_bytes(checkpoint))
        with (
            partial_of(target, is_folder=False) as (partial, descriptor),
            open(descriptor, "wb", closefd=False) as file,
        ):
            signed = SignedFile(file)
            try:
                torch.save(checkpoint, cast(IO[bytes], signed))
                signed.sign()
            except BaseException as error:
                if is_full(error) or is_full(signed.error):
                    raise got_full(path) from error
                raise
            partial.replace(target)
        sync_folder(target.parent)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file, or the folder of a sharded strategy, onto the CPU.

        Args:
            path: The checkpoint.
            map_location: For paths that are not local.
            weights_only: False makes whatever is in it, and runs what is hidden there.

        Raises:
            CheckpointError: If it is missing, damaged or something else.
            UnsafeCheckpointError: If it holds more than tensors and plain values.
        """
        if "://" in str(path):
            with refusing(path):  # where nothing is asked for, Lightning 2.6 runs what is hidden at `http`
                return self._remote.load_checkpoint(path, map_location, weights_only is not False)
        if self.verify:
            verify(path)
        return read_run(path, weights_only).checkpoint()

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or folder."""
        self._remote.remove_checkpoint(path)


def use_atomic_checkpoints(strategy: Strategy) -> None:
    """Let a strategy write and read checkpoints by this plugin, unless the Trainer was given another.

    `AsyncCheckpointIO` without one of its own has a thread write by this plugin.
    """
    current = strategy.checkpoint_io
    if type(current) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()
    elif type(current) is AsyncCheckpointIO and type(current.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AsyncCheckpointIO(AtomicCheckpointIO())


def read_by(checkpoint_io: CheckpointIO, path: str | Path, weights_only: bool | None = None) -> SavedRun:
    """Read the checkpoint of any strategy as `read_run` does, or by the Trainer's plugin where only that can.

    Args:
        checkpoint_io: The plugin of the Trainer.
        path: A file or folder of this machine that its digests vouch for, or whatever the plugin reads.
        weights_only: See `read_run`.

    Raises:
        CheckpointError: If it is damaged, or no checkpoint.
    """
    if _reads_by_itself(checkpoint_io, path):
        return run_of(checkpoint_io.load_checkpoint(path, weights_only=weights_only), path)
    verify(path)
    return read_run(path, weights_only)


def _reads_by_itself(checkpoint_io: CheckpointIO, path: str | Path) -> bool:
    """Whether only the plugin knows how to read a checkpoint, which may be no file of `torch.save` or folder of ours.

    It may encrypt or compress, or write somewhere else.
    """
    if "://" in str(path):
        return True
    while isinstance(checkpoint_io, AsyncCheckpointIO) and (
        type(checkpoint_io).load_checkpoint is AsyncCheckpointIO.load_checkpoint
    ):
        assert checkpoint_io.checkpoint_io is not None
        checkpoint_io = checkpoint_io.checkpoint_io
    is_plain = type(checkpoint_io).load_checkpoint in (
        AtomicCheckpointIO.load_checkpoint,
        TorchCheckpointIO.load_checkpoint,
    )
    return not is_plain and not is_sharded(path)
