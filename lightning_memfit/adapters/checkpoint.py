"""Checkpoints of adapters alone: their contents, a checksum of the frozen weights they belong to, and peft folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memfit.adapters.linears import is_conv1d
from lightning_memfit.extras import require
from lightning_memfit.memory.ledger import held_tensors
from lightning_memfit.memory.state_dicts import joined_versions, versioned

KEY = "memfit_adapters"
"""Entry that marks a checkpoint without frozen weights."""

_BASE = "base_layer."
"""What peft puts before the names of an adapted layer's own weights."""

_PREFIX = "base_model.model."
_PEFT = re.compile(r"(\.lora_[AB])\.weight$")


def base_checksum(module: nn.Module, trained: Iterable[str] = (), dtype: torch.dtype | None = None) -> int:
    """Checksum of the bits and order of a plain module's frozen weights.

    Args:
        module: The module, without adapters.
        trained: Names of parameters that aren't frozen.
        dtype: What floating-point weights are converted to, one after the other; None leaves them as they are.
    """
    left_out, checksum = set(trained), 0
    for name, weight in module.named_parameters():
        if name not in left_out:
            bits = weight if dtype is None or not weight.is_floating_point() else weight.detach().to(dtype)
            checksum = (checksum * 31 + _sum_of_words(bits)) % (1 << 61)
    return checksum


def _sum_of_words(tensor: Tensor) -> int:
    """Sum of a tensor's 64-bit words, which wraps around, whatever its dtype, shape and place in memory."""
    total = 0
    for part in held_tensors(tensor.detach()):
        data = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
        data = data.contiguous().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()  # words begin at multiples of 8 bytes
        whole = data.numel() // 8 * 8
        total += int(data[:whole].view(torch.int64).sum() + data[whole:].long().sum())
    return total


def plain_name(name: str) -> str:
    """Name of a weight in the module without adapters."""
    return name.replace(f".{_BASE}", ".")


def refuse_incomplete(record: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks some of what was trained.

    Raises:
        ValueError: If an adapter, or a weight that was trained as a whole, is not among the entries.
    """
    wanted = [f"{name}.lora_{part}.default.weight" for name in record["layers"] for part in "AB"]
    plain = {plain_name(name) for name in entries}
    missing = next((name for name in (*wanted, *record["trained"]) if name not in plain), None)
    if missing is not None:
        raise ValueError(
            f"`ckpt_path` lacks {missing}, which its run has trained: something has taken it out. Use a checkpoint "
            "that has it."
        )


def refuse_others(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of adapters that are not those of this run.

    Raises:
        ValueError: If rank, scale, layers, bits or frozen weights are others.
    """
    for key in ("rank", "alpha", "layers", "bits"):
        if theirs[key] != ours[key]:
            found = sorted(set(theirs[key]) ^ set(ours[key])) if key == "layers" else f"{theirs[key]}, not {ours[key]}"
            raise ValueError(
                f"`ckpt_path` has adapters of other {key} ({found}). Resume with the same arguments, or merge the "
                "checkpoint into the module (`lightning_memfit.merged_state_dict`) and train new adapters from there."
            )
    if None not in (theirs["base"], ours["base"]) and theirs["base"] != ours["base"]:
        raise ValueError(
            "`ckpt_path` has adapters for other frozen weights than the module's. Start from the same weights, in "
            "the same precision (random ones need the same seed; a module that was trained holds merged ones)."
        )


def merged_entries(
    entries: Mapping[str, Tensor], layers: Mapping[str, Any], plain: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """A state dictionary without adapters of a module that has them, with what was learned in its weights.

    Args:
        entries: The module's state dictionary.
        layers: Its adapted layers, from `adapted_layers`.
        plain: Gives the layer below an adapter, or the one that waits for it while it is quantized.
    """
    from lightning_memfit.adapters.lora import NAME, add_product

    made = dict(entries)
    for name, layer in layers.items():
        a, b = (made.pop(f"{name}.lora_{part}.{NAME}.weight") for part in "AB")
        own = made[f"{name}.{_BASE}weight"]
        weight = (
            own.clone()
            if own.is_floating_point()
            else plain(layer).weight.detach().to(layer.get_base_layer().like, copy=True)
        )
        add_product(weight, a, b, layer.scaling[NAME], is_conv1d(plain(layer)))
        made[f"{name}.{_BASE}weight"] = weight
    return {plain_name(name): value for name, value in made.items()}


def merge_into(weights: Mapping[str, Tensor], entries: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Take what was trained over into a plain state dictionary, in place, with the adapters merged.

    Args:
        weights: By their names in a module without adapters.
        entries: A checkpoint's state dictionary.
        record: The checkpoint's entry `KEY`.
    """
    from lightning_memfit.adapters.lora import add_product

    with torch.no_grad():
        for name, value in entries.items():
            own = weights.get(plain_name(name))
            if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
                own.copy_(value)
        for name, transposed in record["layers"].items():
            a, b = (entries[f"{name}.lora_{part}.default.weight"] for part in "AB")
            add_product(weights[f"{name}.weight"], a, b, record["alpha"] / record["rank"], transposed)


def merged_state_dict(module: nn.Module, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a checkpoint of adapters to the state dictionary of the plain module, with the adapters merged.

    To use it without Lora: `module.load_state_dict(merged_state_dict(module, torch.load(path)))`.

    Args:
        module: The module without adapters, with the weights that they were trained beside, newly built. Not changed.
        checkpoint: What `torch.load` returned, with the entry `KEY`.

    Raises:
        ValueError: If the checkpoint holds no adapters, or the module has other weights than those that were frozen, or
            lacks a layer.
    """
    if KEY not in checkpoint:
        raise ValueError("`checkpoint` holds no adapters. Load its entry `state_dict` as it is.")
    record, entries, own = checkpoint[KEY], checkpoint["state_dict"], module.state_dict()
    refuse_incomplete(record, entries)
    unknown = [name for name in record["layers"] if f"{name}.weight" not in own]
    if unknown:
        raise ValueError(f"`checkpoint` has an adapter for {unknown[0]}, which {type(module).__name__} lacks.")
    if record["base"] not in (None, base_checksum(module, record["trained"])):
        raise ValueError(
            "`checkpoint` has adapters for other frozen weights than the module's. Build the module with the weights "
            "that the run began with (random ones need the same seed)."
        )
    plain = {plain_name(name): value for name, value in entries.items() if ".lora_" not in name}
    state = {name: one.clone() if isinstance(one, Tensor) else one for name, one in own.items()}
    # What isn't a tensor comes from `get_extra_state`, and other names and shapes are for `load_state_dict` to refuse.
    other = (name for name, one in plain.items() if getattr(one, "shape", one) != getattr(own.get(name), "shape", None))
    state |= {name: plain[name] for name in other}
    merge_into(state, entries, record)
    return versioned(state, joined_versions(own, entries))


def write_peft_folder(
    folder: Path, checkpoint: Mapping[str, Any], prefix: str, network: nn.Module, base_model: str | None, task: str
) -> None:
    """Write adapters as `peft.PeftModel.from_pretrained(model, folder)` reads them.

    What was trained beside them goes along, as modules that peft saves as a whole.

    Args:
        folder: A new or empty folder.
        checkpoint: A checkpoint with the entry `KEY`.
        prefix: Prefix of the names of the model's own modules, such as `model.`.
        network: The model without adapters, on the meta device; it gets them.
        base_model: Name or folder of the frozen model, noted in the configuration.
        task: What peft calls the model's task.

    Raises:
        ValueError: If a peft folder can't hold everything that was trained.
    """
    require("peft", "Writing a peft folder")
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file

    record, entries = checkpoint[KEY], checkpoint["state_dict"]
    refuse_incomplete(record, entries)
    own = {name.removeprefix(prefix): value for name, value in entries.items()}
    layers = {name.removeprefix(prefix): transposed for name, transposed in record["layers"].items()}
    whole = {name.rpartition(".")[0] for name, _ in network.named_parameters(remove_duplicate=False) if name in own}
    changed = {name for name, _ in network.named_buffers() if name.endswith(".running_mean") and name in own}
    config = LoraConfig(
        r=record["rank"],
        lora_alpha=record["alpha"],
        target_modules=sorted(layers),
        modules_to_save=sorted(whole) or None,
        fan_in_fan_out=all(layers.values()),
        base_model_name_or_path=base_model,
        task_type=task,
        inference_mode=True,
    )
    with torch.device("meta"):
        adapted: Any = get_peft_model(network, config)
    names = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    weights: dict[str, Any] = {
        name: own.get(_PEFT.sub(r"\1.default.weight", name.removeprefix(_PREFIX))) for name in names
    }
    held = {name.removeprefix(_PREFIX).rpartition(".")[0] for name in weights}
    wrong = [name for name, value in weights.items() if value is None]
    wrong += [
        name
        for name in (*changed, *own)
        if (name in changed and name.rpartition(".")[0] not in held) or f".{_BASE}" in name
    ]
    if wrong:
        raise ValueError(
            f"`ckpt_path` can't be written as a peft folder: {wrong[0]} was not trained as peft would save or lack it. "
            "Leave `--adapters_only` out: the merged model has what was trained."
        )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(
        {name: value.clone().contiguous() for name, value in weights.items()}, folder / "adapter_model.safetensors"
    )
