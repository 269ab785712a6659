"""Checkpoints of adapters alone: merged into the weights of a plain module, and as the folders that peft reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memfit.adapters.linears import is_conv1d
from lightning_memfit.extras import require

KEY = "memfit_adapters"
"""Entry that marks a checkpoint without frozen weights: `rank`, `alpha`, `bits`, and the names of adapted `layers`."""


@torch.no_grad()
def merged(name: str, layer: nn.Module, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight of a plain layer with an adapter added, in float32 and rounded once.

    Raises:
        ValueError: If the weight has 4 or 8 bits.
    """
    if not weight.is_floating_point():
        raise ValueError(
            f"{name} has a weight in 4 or 8 bits, into which no adapter is merged. Merge a checkpoint into the plain "
            "weights: `lightning_memfit.merged_state_dict`, or `memfit export`."
        )
    dtype = torch.promote_types(weight.dtype, torch.float32)
    factors = (one.to(weight.device, dtype) for one in ((a.T, b.T) if is_conv1d(layer) else (b, a)))
    return weight.to(dtype, copy=True).addmm_(*factors, alpha=scale).to(weight.dtype)


def merged_state_dict(module: nn.Module, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a checkpoint of adapters to the state dictionary of the plain module, with the adapters merged.

    To use it without Lora: `module.load_state_dict(merged_state_dict(module, torch.load(path)))`.

    Args:
        module: The module without adapters, with the weights that they were trained beside, newly built. Not changed.
        checkpoint: What `torch.load` returned, with the entry `KEY`.

    Raises:
        ValueError: If the checkpoint holds no adapters, or the module lacks a layer or has it in 4 or 8 bits.
    """
    if KEY not in checkpoint:
        raise ValueError("`checkpoint` holds no adapters. Load its entry `state_dict` as it is.")
    record, entries = checkpoint[KEY], checkpoint["state_dict"]
    own: dict[str, Any] = module.state_dict()  # with the versions of modules' formats, which torch keeps beside it
    unknown = [name for name in record["layers"] if f"{name}.weight" not in own]
    if unknown:
        raise ValueError(f"`checkpoint` has an adapter for {unknown[0]}, which {type(module).__name__} lacks.")
    own.update({name.replace(".base_layer.", "."): one for name, one in entries.items() if ".lora_" not in name})
    for name in record["layers"]:
        a, b = (entries[f"{name}.lora_{part}.default.weight"] for part in "AB")
        key, scale = f"{name}.weight", record["alpha"] / record["rank"]
        own[key] = merged(name, module.get_submodule(name), own[key], a, b, scale)
    return own


def write_peft_folder(
    folder: Path, checkpoint: Mapping[str, Any], network: nn.Module, base_model: str | None, task: str | None
) -> None:
    """Write adapters, and modules trained beside them, as `peft.PeftModel.from_pretrained(model, folder)` reads them.

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
    ours = {
        name: re.sub(r"(\.lora_[AB])\.weight$", r"\1.default.weight", name.removeprefix("base_model.model."))
        for name in names
    }
    wrong = sorted((set(ours.values()) ^ entries.keys()) - buffers)
    if wrong:
        raise ValueError(
            f"`ckpt_path` can't be written as a peft folder: {wrong[0]} was not trained as peft would save or lack it. "
            "Leave `--adapters_only` out: the merged model has what was trained."
        )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    weights = {name: entries[own].clone().contiguous() for name, own in ours.items()}
    save_file(weights, folder / "adapter_model.safetensors")
