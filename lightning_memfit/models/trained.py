"""Trained models on disk: from a training checkpoint, to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURE_KEY = "memfit_architecture"
_PREFIX = "model."


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a single-file checkpoint of a `CausalLM` onto the CPU, memory-mapped.

    Raises:
        ValueError: If there is no such file, or it is no checkpoint of a `CausalLM`.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"`ckpt_path={str(path)!r}` is a sharded checkpoint folder. Consolidate it first.")
    if not file.is_file():
        raise ValueError(f"`ckpt_path={str(path)!r}`: there is no such file.")
    checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if ARCHITECTURE_KEY not in checkpoint:
        raise ValueError(f"`ckpt_path={str(path)!r}` is not a checkpoint of a CausalLM.")
    return checkpoint


def network_from_checkpoint(checkpoint: dict[str, Any]) -> PreTrainedModel:
    """Build the trained network in evaluation mode, in the precision it was saved in and without asking the hub.

    Args:
        checkpoint: What `load_checkpoint` returned.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = checkpoint[ARCHITECTURE_KEY]
    config = type(AutoConfig.for_model(entries["model_type"])).from_dict(entries)
    weights = {k.removeprefix(_PREFIX): v for k, v in checkpoint["state_dict"].items() if k.startswith(_PREFIX)}
    dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    network.load_state_dict(weights)
    return network.eval()


def export_folder(network: PreTrainedModel, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Write a Hugging Face folder that `from_pretrained` loads again.

    Args:
        network: The model.
        folder: Where to write; created if missing.
        tokenizer: Written beside the weights.

    Raises:
        ValueError: If the folder has content already.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"`folder={str(folder)!r}` is not empty. Name a new folder: nothing is overwritten.")
    was_cached, network.config.use_cache = network.config.use_cache, True  # off only for training
    try:
        network.save_pretrained(target)
    finally:
        network.config.use_cache = was_cached
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    return target
