"""From the checkpoint folder of a sharded run to one checkpoint with whole fp32 weights."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_memfit.strategies.nvme_internals import SUB_GROUPS, reading_swapped_weights

# What DeepSpeed 0.19 adds to the file that also holds what Lightning saves.
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

    ZeRO's weights come from the optimizer's fp32 master weights. Needs host memory for all of them; optimizer states
    are left out. The file written with `torch.save` can be loaded with `load_from_checkpoint`, `load_full_weights`, and
    `memfit export`.

    Args:
        folder: What `Trainer.save_checkpoint` wrote, under ZeRO or FSDP2.

    Returns:
        `state_dict` and everything that Lightning and the module saved.

    Raises:
        ValueError: If it is no such folder.
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
    with TemporaryDirectory() as folder:  # torch joins shards by way of a file
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(root, whole)
        state_dict = torch.load(whole, map_location="cpu", weights_only=True)["state_dict"]
    saved = torch.load(root / "meta.pt", map_location="cpu", weights_only=False)
    return saved | {"state_dict": state_dict}
