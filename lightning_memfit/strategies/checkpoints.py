"""Checkpoint folders of sharded runs: replaced as a whole, read as one file, resumed with other ranks or another stage.

`rewritten` never leaves half a checkpoint; `named_states` fits the states of one device to sharded parameters;
`consolidated` joins the shards of ZeRO or FSDP2; `SavedRun` and `convert` continue a ZeRO run through DeepSpeed's
universal checkpoints.
"""

import ctypes
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_memfit.strategies.upstream.deepspeed import SUB_GROUPS, reading_swapped_weights

ZERO_MARK, FSDP2_MARK = "latest", "meta.pt"
"""Files by which a folder is known to be a checkpoint of that kind; each is written last."""


@contextmanager
def rewritten(path: str | Path, is_writer: bool, barrier: Callable[[], None], mark: str = ZERO_MARK) -> Iterator[Path]:
    """Give a folder next to `path` to write to, which replaces `path` once everything is written.

    All ranks enter and leave together. An earlier checkpoint at `path` stays until then: the two change places in one
    call where the system has it (Linux), elsewhere in two. A run that dies in between leaves it untouched, together
    with a folder `<path>.partial`, which the next save replaces.

    Args:
        path: Where the checkpoint is to be.
        is_writer: Whether this rank moves folders: one per machine.
        barrier: Waits for all ranks.
        mark: A file that every checkpoint of this kind has, `ZERO_MARK` or `FSDP2_MARK`.

    Raises:
        FileExistsError: If something other than such a checkpoint is at `path`.
    """
    target = Path(path)
    partial, former = (target.with_name(f"{target.name}.{suffix}") for suffix in ("partial", "former"))
    if target.exists() and not (target / mark).is_file():
        raise FileExistsError(
            f"{str(target)!r} is not a checkpoint of this strategy (a folder with {mark!r}), and is not overwritten. "
            "Name another."
        )
    barrier()  # no rank writes before all have looked
    if is_writer:
        _remove(partial)
    barrier()
    yield partial
    barrier()
    if is_writer and partial.exists():  # another machine may share the folder and have been faster
        _remove(former)
        if not target.exists():
            partial.rename(target)
        elif _exchanged(partial, target):
            _remove(partial)
        else:
            target.rename(former)
            partial.rename(target)
            _remove(former)
    barrier()


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places at once, by `renameat2(2)`; False where that call is missing."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(exchange)) == 0)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def named_states(
    saved: dict[str, Any], groups: Sequence[dict[str, Any]], names: dict[int, str], path: str | Path
) -> dict[str, Any]:
    """An optimizer's state dict by names of parameters instead of numbers, which count through its groups.

    Args:
        saved: `Optimizer.state_dict()` of a run on one device or under DDP; one with names stays as it is.
        groups: `param_groups` of the optimizer that goes on.
        names: Names of the module's parameters by `id`.
        path: The checkpoint, for messages.

    Raises:
        ValueError: If the groups have other numbers of parameters, or a state is of another shape than its parameter.
    """
    keys = [group["params"] for group in saved["param_groups"]]
    if any(isinstance(key, str) for group in keys for key in group):
        return saved
    if [len(group) for group in keys] != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"`ckpt_path={str(path)!r}` has optimizer groups of {', '.join(str(len(group)) for group in keys)} "
            f"parameters, this run of {', '.join(str(len(group['params'])) for group in groups)}. Make the optimizer "
            "as the saved run did, or load the weights alone."
        )
    parameters = {
        key: parameter
        for group, live in zip(keys, groups, strict=True)
        for key, parameter in zip(group, live["params"], strict=True)
    }
    for key, state in saved["state"].items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameters[key].shape:
                raise ValueError(
                    f"`ckpt_path={str(path)!r}` has an optimizer state of shape {tuple(value.shape)} where this run's "
                    f"{names[id(parameters[key])]!r} has {tuple(parameters[key].shape)}: the optimizer's groups are "
                    "in another order. Make the optimizer as the saved run did, or load the weights alone."
                )
    named = {key: names[id(parameter)] for key, parameter in parameters.items()}
    return {
        "state": {named[key]: state for key, state in saved["state"].items()},
        "param_groups": [
            group | {"params": [named[key] for key in group["params"]]} for group in saved["param_groups"]
        ],
    }


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
    if (root / ZERO_MARK).is_file():
        return _from_zero(root)
    if (root / FSDP2_MARK).is_file():
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


def is_sharded(path: str | Path) -> bool:
    """Whether there is a checkpoint folder of a sharded strategy at a path."""
    return any((Path(path) / mark).is_file() for mark in (ZERO_MARK, FSDP2_MARK))


_TAG = "universal"


@dataclass(frozen=True)
class SavedRun:
    """How a checkpoint folder was written.

    Attributes:
        stage: ZeRO stage.
        world_size: Number of ranks.
        on_disk: Whether the optimizer's states were on disk, so that the checkpoint has copies of their files.
    """

    stage: int
    world_size: int
    on_disk: bool

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
        on_disk = (files[0].parent / "offloaded_tensors").is_dir()
        return cls(int(saved["optimizer_state_dict"]["zero_stage"]), len(files), on_disk)

    def needs_conversion(self, stage: int, world_size: int, on_disk: bool) -> bool:
        """Whether a run must go through a universal checkpoint to resume from this one.

        Args:
            stage: ZeRO stage of the run.
            world_size: Its number of ranks.
            on_disk: Whether its optimizer's states are on disk.

        Raises:
            ValueError: If the conversion would not be exact. For stage 3 it changes the moments a little: the next
                losses of a small GPT-2 differ by 2e-4. Between stage 3 and the others, DeepSpeed 0.19 fails. Nothing
                converts states on disk to others.
        """
        if on_disk != self.on_disk:
            raise ValueError(
                f"`ckpt_path` was written with optimizer states {_place(self.on_disk)}, and this run has them "
                f"{_place(on_disk)}: it can't go on exactly. Resume with `{_strategy(self.on_disk)}`; or start a new "
                "optimizer from the weights: `memfit export` writes a folder for the model's `pretrained`."
            )
        if (stage, world_size) == (self.stage, self.world_size):
            return False
        if 3 in (stage, self.stage):
            raise ValueError(
                f"`ckpt_path` was written by stage {self.stage} on {self.world_size} ranks, and can't go on exactly "
                f"with stage {stage} on {world_size}. Use the same stage and number of ranks; or start a new "
                "optimizer from the weights: `memfit export` writes a folder for the model's `pretrained`."
            )
        return True


def _place(on_disk: bool) -> str:
    return "on disk" if on_disk else "in memory"


def _strategy(on_disk: bool) -> str:
    return "memfit_zero_infinity" if on_disk else "memfit_zero_3"


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
