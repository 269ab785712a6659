"""Checkpoint folders of sharded runs: replaced as a whole, read as one file, resumed with other ranks or another stage.

`rewritten` never leaves half a checkpoint; `consolidated` joins the shards of ZeRO or FSDP2; `SavedRun` and `convert`
continue a ZeRO run through DeepSpeed's universal checkpoints.
"""

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_memfit.strategies.upstream.deepspeed import SUB_GROUPS, reading_swapped_weights


@contextmanager
def rewritten(path: str | Path, is_writer: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """Give a folder next to `path` to write to, which replaces `path` once everything is written.

    All ranks enter and leave together. An earlier checkpoint at `path` stays until then. A run that dies in between
    leaves it untouched, together with a folder `<path>.partial`, which the next save replaces.

    Args:
        path: Where the checkpoint is to be.
        is_writer: Whether this rank moves folders: one per machine.
        barrier: Waits for all ranks.

    Raises:
        FileExistsError: If something other than a DeepSpeed checkpoint is at `path`.
    """
    target = Path(path)
    partial, former = (target.with_name(f"{target.name}.{suffix}") for suffix in ("partial", "former"))
    if target.exists() and not (target / "latest").is_file():
        raise FileExistsError(f"{str(target)!r} is not a DeepSpeed checkpoint, and is not overwritten. Name another.")
    barrier()  # no rank writes before all have looked
    if is_writer:
        _remove(partial)
    barrier()
    yield partial
    barrier()
    if is_writer and partial.exists():  # another machine may share the folder and have been faster
        _remove(former)
        if target.exists():
            target.rename(former)
        partial.rename(target)
        _remove(former)
    barrier()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


# Keys that DeepSpeed 0.19 adds to the file that also holds what Lightning saves.
_DEEPSPEED_KEYS = {
    "buffer_names",
    "checkpoint_parallel_dimensions",
    "data_sampler",
    "dp_world_size",
    "ds_config",
    "ds_version",
    "frozen_param_fragments",
    "frozen_param_shapes",
    "global_samples",
    "global_steps",
    "lr_scheduler",
    "module",
    "mp_world_size",
    "optimizer",
    "param_shapes",
    "random_ltd",
    "shared_params",
    "skipped_steps",
    SUB_GROUPS,
}


def consolidated(folder: str | Path) -> dict[str, Any]:
    """Read the checkpoint folder of a ZeRO strategy as if it were the file of a run on one device.

    ZeRO's weights come from the optimizer's fp32 master weights. This needs host memory for all of them; optimizer
    states are left out. Saved with `torch.save`, the result can be loaded with `load_from_checkpoint`,
    `load_full_weights`, and `memfit export`.

    Args:
        folder: The folder that `Trainer.save_checkpoint` wrote, under ZeRO or FSDP2.

    Returns:
        `state_dict` and everything else that Lightning and the module saved.

    Raises:
        ValueError: If the folder is not such a checkpoint.
    """
    root = Path(folder)
    if (root / "latest").is_file():
        return _from_zero(root)
    if (root / "meta.pt").is_file():
        return _from_fsdp2(root)
    raise ValueError(f"{str(folder)!r} is no sharded checkpoint: it has neither `latest` (ZeRO) nor `meta.pt` (FSDP2).")


def _from_zero(root: Path) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with reading_swapped_weights():
        state_dict = get_fp32_state_dict_from_zero_checkpoint(str(root))
    tag = (root / "latest").read_text().strip()
    files = sorted((root / tag).glob("*mp_rank_00_model_states.pt"))
    saved = torch.load(files[0], map_location="cpu", weights_only=False, mmap=True)
    ours = {key: value for key, value in saved.items() if key not in _DEEPSPEED_KEYS}
    return ours | {"state_dict": state_dict}


def _from_fsdp2(root: Path) -> dict[str, Any]:
    with TemporaryDirectory() as folder:  # torch joins shards through a file
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(root, whole)
        state_dict = torch.load(whole, map_location="cpu", weights_only=True)["state_dict"]
    saved: dict[str, Any] = torch.load(root / "meta.pt", map_location="cpu", weights_only=False)
    return saved | {"state_dict": state_dict}


_TAG = "universal"


@dataclass(frozen=True)
class SavedRun:
    """How a checkpoint folder was written.

    Attributes:
        stage: ZeRO stage.
        world_size: Number of ranks.
    """

    stage: int
    world_size: int

    @classmethod
    def read(cls, folder: Path) -> "SavedRun":
        """Read this from the optimizer's files, which are mapped and not loaded.

        Raises:
            ValueError: If the folder holds no states of a ZeRO optimizer.
        """
        latest = folder / "latest"
        files = sorted((folder / latest.read_text().strip()).glob("*_optim_states.pt")) if latest.is_file() else []
        if not files:
            raise ValueError(
                f"`ckpt_path={str(folder)!r}` holds no optimizer states of a ZeRO strategy, to go on training from. "
                "For one file with whole weights use stage 3 with `load_full_weights: true`."
            )
        saved = torch.load(files[0], map_location="cpu", weights_only=False, mmap=True)
        return cls(int(saved["optimizer_state_dict"]["zero_stage"]), len(files))

    def needs_conversion(self, stage: int, world_size: int) -> bool:
        """Whether a run must go through a universal checkpoint to resume from this one.

        Raises:
            ValueError: If the conversion would not be exact. For stage 3 it changes the moments a little: the next
                losses of a small GPT-2 differ by 2e-4. Between stage 3 and the others, DeepSpeed 0.19 fails.
        """
        if (stage, world_size) == (self.stage, self.world_size):
            return False
        if 3 in (stage, self.stage):
            raise ValueError(
                f"`ckpt_path` was written by stage {self.stage} on {self.world_size} ranks, and can't go on exactly "
                f"with stage {stage} on {world_size}. Use the same stage and number of ranks; or start a new "
                "optimizer from the weights: `memfit export` writes a folder for the model's `pretrained`."
            )
        return True


def convert(folder: Path) -> None:
    """Write a universal checkpoint into a checkpoint folder of stage 1 or 2, in addition to its contents.

    It takes 12 bytes per parameter. A finished one is kept.
    """
    if (folder / f"latest_{_TAG}").is_file():
        return
    from deepspeed.checkpoint.ds_to_universal import main

    source = folder / (folder / "latest").read_text().strip()
    main(
        Namespace(
            input_folder=str(source),
            output_folder=str(folder / _TAG),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # Lightning does not save the description of the parameters that this needs
        )
    )
