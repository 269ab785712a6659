"""Checkpoint folders of ZeRO and FSDP2 read as if they were the file of a run on one device."""

from functools import cache
from pathlib import Path
from typing import Any

from lightning.pytorch.core import saving

from lightning_memfit.strategies.integrity import FSDP2_MARK, ZERO_MARK, is_sharded, verify
from lightning_memfit.strategies.safe_loading import without_code


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
