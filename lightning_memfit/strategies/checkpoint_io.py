"""`AtomicCheckpointIO`: checkpoints that are whole or absent, checked before they are read; `consolidated`: folders."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.core import saving
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_memfit.strategies.integrity import FSDP2_MARK, ZERO_MARK, is_sharded, replacing_file, verify
from lightning_memfit.strategies.safe_loading import without_code


class AtomicCheckpointIO(CheckpointIO):
    """Write a checkpoint beside its place and rename it when the disk has all of it; check it before it is read.

    A run that is killed or finds the disk full leaves the checkpoint that was there. The checksums in the file are
    compared when it is loaded, so that one flipped bit is found, and only tensors and plain values are loaded.

    The strategies of this package and `memfit fit` use it by themselves. With any other:
    `Trainer(plugins=[AtomicCheckpointIO()])`. Paths that are not local (`s3://...`) are left to Lightning's own plugin.

    Args:
        verify: Compare checksums before loading, which reads the file once more.
    """

    def __init__(self, verify: bool = True) -> None:
        self.verify = verify
        self._remote = TorchCheckpointIO()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a file; an existing one stays until the new one is whole. A link is replaced, not what it leads to.

        Raises:
            CheckpointError: If it could not be written, as on a full disk.
        """
        if "://" in str(path):
            self._remote.save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("`storage_options` is for paths that are not local: leave it out.")
        with replacing_file(Path(path)) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file onto the CPU; of the folder of a sharded strategy, everything but optimizer states.

        Args:
            path: The checkpoint.
            map_location: For paths that are not local.
            weights_only: False makes whatever is in it, and runs what is hidden there.

        Raises:
            CheckpointError: If it is missing, damaged or something else.
            UnsafeCheckpointError: If it holds more than tensors and plain values.
        """
        if "://" in str(path):
            with without_code(path, weights_only):  # where nothing is asked for, Lightning 2.6 runs what is hidden
                return self._remote.load_checkpoint(path, map_location, weights_only is not False)
        if self.verify:
            verify(path)
        if Path(path).is_dir():
            return consolidated(path, weights_only)
        with without_code(path, weights_only):  # into memory of its own: the next save may replace the file
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only is not False)  # nosec B614
        return loaded

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


# --- folders of sharded strategies ------------------------------------------------------------------------------------


def consolidated(folder: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Read the checkpoint folder of a ZeRO strategy or of FSDP2 as if it were the file of a run on one device.

    ZeRO's weights come from the optimizer's fp32 master weights. This needs host memory for all of them; optimizer
    states are left out. Saved with `torch.save`, the result is a file for any strategy and for `load_full_weights`.

    Returns:
        `state_dict` and everything else that Lightning and the module saved.

    Raises:
        ValueError: If the folder is not such a checkpoint, or damaged.
    """
    path = Path(folder)
    if not is_sharded(path):
        raise ValueError(
            f"{str(path)!r} is no sharded checkpoint: it has neither {ZERO_MARK!r} (ZeRO) nor {FSDP2_MARK!r} (FSDP2)."
        )
    with without_code(path, weights_only):
        if (path / ZERO_MARK).is_file():
            from lightning_memfit.strategies.upstream.deepspeed import ZeroFolder

            return ZeroFolder(path).whole()
        from lightning_memfit.strategies.shards import whole

        return whole(path)


@cache
def read_folders_in_load_from_checkpoint() -> None:
    """Let `LightningModule.load_from_checkpoint(FOLDER)` take a sharded checkpoint.

    Lightning 2.6 opens it as a file: IsADirectoryError (https://github.com/Lightning-AI/pytorch-lightning/issues/11947).
    """
    plain: Any = saving.pl_load

    def read(path: Any, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> Any:
        if isinstance(path, (str, Path)) and is_sharded(path):
            verify(path, is_alone=True)
            return consolidated(path, weights_only)
        return plain(path, *args, weights_only=weights_only, **kwargs)

    vars(saving)["pl_load"] = read
