"""Checkpoints of adapters alone: merged into the weights of a plain module, and as the folders that peft reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memfit.adapters.linears import is_conv1d
from lightning_memfit.extras import require

KEY = "memfit_adapters"
"""Entry that marks a checkpoint without frozen weights: `rank`, `alpha`, `bits`, and the names of adapted `layers`."""

_BASE = "base_layer."
"""What peft puts before the names of an adapted layer's own weights."""
_PREFIX = "base_model.model."
_PEFT = re.compile(r"(\.lora_[AB])\.weight$")


@torch.no_grad()
def merged_entries(
    module: nn.Module, entries: Mapping[str, Any], scale: float, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A plain module's state dictionary with adapters merged: added to the weights in float32 and rounded once.

    Raises:
        ValueError: If the frozen weight below an adapter has 4 or 8 bits.
    """
    plain = {name.replace(f".{_BASE}", "."): one for name, one in entries.items() if ".lora_" not in name}
    made = {**(own or {}), **plain}
    for name in [name.partition(".lora_A.")[0] for name in entries if ".lora_A." in name]:
        layer = module.get_submodule(name)
        weight = made[f"{name}.weight"]
        if not weight.is_floating_point():
            raise ValueError(
                f"{name} has a weight in 4 or 8 bits, into which no adapter is merged. Merge a checkpoint into the "
                "module's own weights: `lightning_memfit.merged_state_dict`, or `memfit export`."
            )
        a, b = (entries[f"{name}.lora_{part}.default.weight"] for part in "AB")
        left, right = (a.T, b.T) if is_conv1d(getattr(layer, "base_layer", layer)) else (b, a)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        factors = (left.to(weight.device, dtype), right.to(weight.device, dtype))
        made[f"{name}.weight"] = weight.to(dtype, copy=True).addmm_(*factors, alpha=scale).to(weight.dtype)
    return made


def merged_state_dict(module: nn.Module, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a checkpoint of adapters to the state dictionary of the plain module, with the adapters merged.

    To use it without Lora: `module.load_state_dict(merged_state_dict(module, torch.load(path)))`.

    Args:
        module: The module without adapters, with the weights that they were trained beside, newly built. Not changed.
        checkpoint: What `torch.load` returned, with the entry `KEY`.

    Raises:
        ValueError: If the checkpoint holds no adapters, or the module lacks a layer.
    """
    if KEY not in checkpoint:
        raise ValueError("`checkpoint` holds no adapters. Load its entry `state_dict` as it is.")
    record = checkpoint[KEY]
    own: dict[str, Any] = module.state_dict()
    unknown = [name for name in record["layers"] if f"{name}.weight" not in own]
    if unknown:
        raise ValueError(f"`checkpoint` has an adapter for {unknown[0]}, which {type(module).__name__} lacks.")
    own.update(merged_entries(module, checkpoint["state_dict"], record["alpha"] / record["rank"], own))
    return own  # with the versions of modules' formats, which torch keeps beside the entries


def write_peft_folder(
    folder: Path, checkpoint: Mapping[str, Any], network: nn.Module, base_model: str | None, task: str | None
) -> None:
    """Write adapters as `peft.PeftModel.from_pretrained(model, folder)` reads them.

    What was trained beside them goes along, as modules that peft saves as a whole.

    Raises:
        ValueError: If a peft folder can't hold everything that was trained.
    """
    require("peft", "Writing a peft folder")
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file

    record, entries = checkpoint[KEY], checkpoint["state_dict"]
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in network.named_buffers() if not name.endswith(".running_mean")}
    config = LoraConfig(
        r=record["rank"],
        lora_alpha=record["alpha"],
        target_modules=sorted(record["layers"]),
        modules_to_save=sorted({name.rpartition(".")[0] for name in parameters & entries.keys()}) or None,
        fan_in_fan_out=all(is_conv1d(network.get_submodule(name)) for name in record["layers"]),
        base_model_name_or_path=base_model,
        task_type=task,
        inference_mode=True,
    )
    with torch.device("meta"):
        adapted: Any = get_peft_model(network, config)
    names = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    ours = {name: _PEFT.sub(r"\1.default.weight", name.removeprefix(_PREFIX)) for name in names}
    wrong = [*(name for name in ours.values() if name not in entries), *(entries.keys() - ours.values() - buffers)]
    if wrong:
        raise ValueError(
            f"`ckpt_path` can't be written as a peft folder: {wrong[0]} was not trained as peft would save or lack it. "
            "Leave `--adapters_only` out: the merged model has what was trained."
        )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    weights = {name: entries[own].clone().contiguous() for name, own in ours.items()}
    save_file(weights, folder / "adapter_model.safetensors")
