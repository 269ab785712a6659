"""Checkpoints of adapters alone: their contents, a checksum of the frozen weights they belong to, and peft folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memfit.adapters.lora import NAME, layer_records

KEY = "memfit_adapters"
"""Entry that marks a checkpoint without frozen weights."""


def describe(module: nn.Module, rank: int, alpha: float) -> dict[str, Any]:
    """Describe a module's adapters in plain data for a checkpoint."""
    return {"rank": rank, "alpha": alpha, "layers": layer_records(module), "base": base_checksum(module)}


def without_frozen(module: nn.Module, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries of a module's state dictionary without frozen parameters and the scales of quantized ones."""
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for name, child in module.named_modules():
        if getattr(child, "is_quantized_linear", False):
            frozen.update(f"{name}.{buffer}" for buffer, _ in child.named_buffers(recurse=False))
    return {name: value for name, value in entries.items() if name not in frozen}


def base_checksum(module: nn.Module) -> int:
    """Checksum of the bits and order of the frozen weights."""
    checksum = 0
    for parameter in module.parameters():
        if not parameter.requires_grad:
            bits = parameter.detach().contiguous().view(torch.uint8).flatten()
            checksum = (checksum * 31 + int(_sum_of_words(bits))) % (1 << 61)
    return checksum


def _sum_of_words(data: Tensor) -> Tensor:
    """Sum of 64-bit words, which wraps around."""
    whole = data.numel() // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].long().sum()


def write_peft_folder(folder: Path, checkpoint: Mapping[str, Any], prefix: str, base_model: str | None) -> None:
    """Write adapters as `peft.PeftModel.from_pretrained(model, folder)` reads them.

    Args:
        folder: A new or empty folder.
        checkpoint: A checkpoint with the entry `KEY`.
        prefix: Prefix of the names of the model's own modules, such as `model.`.
        base_model: Name or folder of the frozen model, noted in the configuration.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    record = checkpoint[KEY]
    config = LoraConfig(
        r=record["rank"],
        lora_alpha=record["alpha"],
        target_modules=sorted(name.removeprefix(prefix) for name in record["layers"]),
        fan_in_fan_out=all(layer["transposed"] for layer in record["layers"].values()),
        base_model_name_or_path=base_model,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    weights = {
        f"base_model.model.{name.removeprefix(prefix)}.lora_{part}.weight": checkpoint["state_dict"][
            f"{name}.lora_{part}.{NAME}.weight"
        ].contiguous()
        for name in record["layers"]
        for part in "AB"
    }
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(weights, folder / "adapter_model.safetensors")
