"""Checkpoints of adapters alone: their contents, a checksum of the frozen weights they belong to, and peft folders."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memfit.adapters.layer import NAME, FrozenLinear
from lightning_memfit.adapters.lora import adapted_layers, adapter_parameters, frozen_layers, layer_records, merge_into
from lightning_memfit.extras import require
from lightning_memfit.memory import Category
from lightning_memfit.memory.host import copy_to_host
from lightning_memfit.memory.ledger import held_tensors
from lightning_memfit.memory.state_dicts import joined_versions, versioned

KEY = "memfit_adapters"
"""Entry that marks a checkpoint without frozen weights."""


def describe(module: nn.Module, rank: int, alpha: float) -> dict[str, Any]:
    """Describe a module's adapters in plain data for a checkpoint."""
    weights = base_weights(module)
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    return {
        "rank": rank,
        "alpha": alpha,
        "layers": layer_records(module),
        "bits": bits_by_layer(module),
        "trained": trained,
        "base": base_checksum(weights, trained),
    }


def bits_by_layer(module: nn.Module) -> dict[str, int]:
    """Bits of the quantized layers, by dotted name."""
    return {name: layer.codes.bits for name, layer in frozen_layers(module).items() if layer.codes is not None}


def base_weights(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters, without adapters; a quantized one is the original, where it waits."""
    skipped = {id(parameter) for parameter in adapter_parameters(module)}
    weights: dict[str, Tensor] = {}
    for prefix, owner in module.named_modules():
        for name in owner._parameters:
            parameter = owner._parameters[name]
            if parameter is None and name == "weight" and isinstance(owner, FrozenLinear):
                parameter = owner.raw
            if parameter is not None and id(parameter) not in skipped:
                skipped.add(id(parameter))
                weights[f"{prefix}.{name}" if prefix else name] = parameter
    return weights


def base_checksum(weights: Mapping[str, Tensor], trained: Iterable[str] = (), dtype: torch.dtype | None = None) -> int:
    """Checksum of the bits and order of the frozen weights.

    Args:
        weights: Those of the module, from `base_weights`.
        trained: Names of the others.
        dtype: What floating-point weights are converted to, one after the other; None leaves them as they are.
    """
    left_out, checksum = set(trained), 0
    for name, weight in weights.items():
        if name not in left_out:
            bits = weight if dtype is None or not weight.is_floating_point() else weight.detach().to(dtype)
            checksum = (checksum * 31 + sum_of_words(bits)) % (1 << 61)
    return checksum


def sum_of_words(tensor: Tensor) -> int:
    """Sum of a tensor's 64-bit words, which wraps around, whatever its dtype, shape and place in memory."""
    parts = list(held_tensors(tensor.detach()))
    if len(parts) > 1:
        return sum(sum_of_words(part) for part in parts)
    data = parts[0]
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    data = data.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # words begin at multiples of 8 bytes
    whole = data.numel() // 8 * 8
    return int(data[:whole].view(torch.int64).sum() + data[whole:].long().sum())


def refuse_incomplete(record: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks some of what was trained.

    Raises:
        ValueError: If an adapter, or a weight that was trained as a whole, is not among the entries.
    """
    own = [name for name, layer in record["layers"].items() if layer.get("shared_with") is None]
    wanted = [f"{name}.lora_{part}.{NAME}.weight" for name in own for part in "AB"] + list(record.get("trained", ()))
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ValueError(
            f"`ckpt_path` lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "") + ", "
            "which its run has trained: it was saved while they were frozen, or something has taken them out. Use a "
            "checkpoint that has them; without them the module would compute something else."
        )


def refuse_others(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of adapters that are not those of this run.

    Raises:
        ValueError: If rank, scale, layers, bits or frozen weights are others.
    """
    for key in ("rank", "alpha", "layers"):
        if theirs[key] != ours[key]:
            detail = _missing_layers(theirs, ours) if key == "layers" else f"{theirs[key]} there, {ours[key]} here"
            raise ValueError(
                f"`ckpt_path` has adapters of other {key} ({detail}). Resume with the same arguments, or merge the "
                "checkpoint into the module (`lightning_memfit.merged_state_dict`) and train new adapters from there."
            )
    if theirs.get("bits", {}) != ours["bits"]:
        raise ValueError(
            f"`ckpt_path` has adapters trained beside weights in {_bits(theirs)}, here they are in {_bits(ours)}: "
            "the same adapters would compute something else. Resume with the same QuantizedWeights, or merge the "
            "checkpoint into the module (`lightning_memfit.merged_state_dict`) and train new adapters from there."
        )
    if theirs["base"] != ours["base"]:
        raise ValueError(
            "`ckpt_path` has adapters for other frozen weights than the module's. Start from the same weights, in "
            "the same precision (random ones need the same seed; a module that was trained holds merged ones)."
        )


def _bits(record: Mapping[str, Any]) -> str:
    bits = sorted(set(record.get("bits", {}).values()))
    return f"{bits[0]} bits ({len(record['bits'])} layers)" if bits else "their own precision"


def _missing_layers(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    different = sorted(theirs["layers"].keys() ^ ours["layers"].keys())
    where = "there" if different and different[0] in theirs["layers"] else "here"
    return f"{len(different)} differ, such as {different[0]}, only {where}" if different else "their scales differ"


def merged_state_dict(module: nn.Module, checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Complete a checkpoint of adapters to the state dictionary of the plain module, with the adapters merged.

    To use it without Lora: `module.load_state_dict(merged_state_dict(module, torch.load(path))[0])`. Entries of the
    checkpoint that the module lacks, or has in another shape, are in it as they are, so that `load_state_dict` is as
    strict with them as with any checkpoint.

    Args:
        module: The module without adapters, with the weights that they were trained beside: newly built, or one that
            was trained or evaluated in this process. Not changed.
        checkpoint: What `torch.load` returned, with the entry `KEY`.

    Returns:
        The state dictionary, and copies of the weights that the adapters change, in host memory.

    Raises:
        ValueError: If the checkpoint holds no adapters, or the module has other weights than those that were frozen, or
            lacks a layer.
    """
    if KEY not in checkpoint:
        raise ValueError("`checkpoint` holds no adapters. Load its entry `state_dict` as it is.")
    record, entries = checkpoint[KEY], checkpoint["state_dict"]
    refuse_incomplete(record, entries)
    own_state = module.state_dict()
    copies = {
        name: value.detach().clone() if isinstance(value, Tensor) else value  # not one: what get_extra_state returns
        for name, value in own_state.items()
    }
    state = versioned(copies, joined_versions(own_state, entries))
    names = [f"{name}.weight" for name in record["layers"]]
    unknown = [name for name in names if name not in state]
    if unknown:
        raise ValueError(f"`ckpt_path` has an adapter for {unknown[0]}, which {type(module).__name__} lacks.")
    before = originals_of(module)
    if before is not None and before.record["base"] == record["base"]:
        originals = dict(before.weights)
    elif base_checksum(base_weights(module), record.get("trained", ())) == record["base"]:
        originals = {name: copy_to_host(state[name], Category.PARAMETER) for name in names}
    else:
        raise ValueError(
            "`ckpt_path` has adapters for other frozen weights than the module's. Build the module with the weights "
            "that the run began with (random ones need the same seed)."
        )
    layers = {id(module.get_submodule(name)) for name in record["layers"]}
    every_name = [name for name, child in module.named_modules(remove_duplicate=False) if id(child) in layers]
    adapters = {f"{name}.lora_{part}.{NAME}.weight" for name in every_name for part in "AB"}
    with torch.no_grad():
        for source in (originals, entries):
            for name in source.keys() - adapters:
                value, own = source[name], state.get(name)
                if isinstance(value, Tensor) and isinstance(own, Tensor) and value.shape == own.shape:
                    own.copy_(value)
                else:
                    state[name] = value
        merge_into(state, entries, record["layers"])
    for first, aliases in _aliases(module).items():
        state.update(dict.fromkeys(aliases, state[first]))
    return state, originals


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """Other names of the parameters that have several, by the first."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            aliases.setdefault(earlier, []).append(name)
    return aliases


@dataclass(frozen=True)
class Originals:
    """Weights of a module from before adapters were merged into them, so that its checkpoints can still be loaded."""

    record: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    """Copies in host memory, by name."""
    merged: int
    """Checksum of the module with merged weights."""

    def restore(self, module: nn.Module) -> None:
        """Put the original weights back."""
        layers = frozen_layers(module)
        with torch.no_grad():
            for name, weight in base_weights(module).items():
                layer = layers.get(name.removesuffix(".weight"))
                if name not in self.weights:
                    continue
                if layer is not None:
                    layer.put(self.weights[name])
                else:
                    weight.copy_(self.weights[name])


_originals: weakref.WeakKeyDictionary[nn.Module, Originals] = weakref.WeakKeyDictionary()


def copy_originals(module: nn.Module) -> dict[str, Tensor]:
    """Copy to host memory the weights that merging will change."""
    layers = adapted_layers(module)
    return {f"{name}.weight": copy_to_host(layer.raw, Category.PARAMETER) for name, layer in layers.items()}


def keep_originals(module: nn.Module, record: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Remember the copies for as long as the module lives, or until its next run."""
    _originals[module] = Originals(record, weights, base_checksum(base_weights(module)))


def originals_of(module: nn.Module) -> Originals | None:
    """The weights from before merging, unless something else has changed the module since."""
    found = _originals.get(module)
    if found is None or base_checksum(base_weights(module)) != found.merged:
        return None
    return found


def write_peft_folder(
    folder: Path,
    checkpoint: Mapping[str, Any],
    prefix: str,
    network: nn.Module,
    base_model: str | None,
    task_type: str | None,
) -> None:
    """Write adapters as `peft.PeftModel.from_pretrained(model, folder)` reads them.

    What was trained beside them goes along, as modules that peft saves as a whole.

    Args:
        folder: A new or empty folder.
        checkpoint: A checkpoint with the entry `KEY`.
        prefix: Prefix of the names of the model's own modules, such as `model.`.
        network: The model without adapters, on the meta device: not changed.
        base_model: Name or folder of the frozen model, noted in the configuration.
        task_type: What peft calls the model's task; None for one that it has no name for.

    Raises:
        ValueError: If peft would not read everything that was trained from it.
    """
    require("peft", "Writing a peft folder")
    from peft import LoraConfig
    from safetensors.torch import save_file

    record, entries = checkpoint[KEY], checkpoint["state_dict"]
    refuse_incomplete(record, entries)
    own = {name.removeprefix(prefix): value for name, value in entries.items()}
    layers = {name.removeprefix(prefix): layer for name, layer in record["layers"].items()}
    whole = _trained_as_a_whole(own, network)
    config = LoraConfig(
        r=record["rank"],
        lora_alpha=record["alpha"],
        target_modules=sorted(layers),
        modules_to_save=sorted(whole) or None,
        fan_in_fan_out=all(layer["transposed"] for layer in layers.values()),
        base_model_name_or_path=base_model,
        task_type=task_type,
        inference_mode=True,
    )
    weights = {
        f"{name}.lora_{part}.weight": own[f"{name}.lora_{part}.{NAME}.weight"] for name in layers for part in "AB"
    }
    for name, module in whole.items():
        weights |= {f"{name}.{key}": own[f"{name}.{key}"] for key in module.state_dict()}
    # Tied weights are written twice: in the folder they are parts of two modules.
    named = {f"base_model.model.{name}": value.clone().contiguous() for name, value in weights.items()}
    _refuse_what_peft_reads_otherwise(network, config, named)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(named, folder / "adapter_model.safetensors")


def _trained_as_a_whole(entries: Mapping[str, Tensor], network: nn.Module) -> dict[str, nn.Module]:
    """Return the modules, by dotted name, that have parameters of their own among a checkpoint's entries.

    Buffers tell nothing: a checkpoint of adapters has all of them.

    Raises:
        ValueError: If only some of a module's parameters and buffers are among them, or the running statistics
            of one whose parameters aren't.
    """
    here = dict(network.named_parameters(remove_duplicate=False)).keys() & entries.keys()
    whole = {name.rpartition(".")[0]: network.get_submodule(name.rpartition(".")[0]) for name in here}
    for name, module in whole.items():
        lacking = [key for key in module.state_dict() if not isinstance(entries.get(f"{name}.{key}"), Tensor)]
        if lacking or not name:
            some = min(key for key in here if key.rpartition(".")[0] == name)
            raise ValueError(
                f"`ckpt_path` has trained {some}, but not all of {name or 'the model'}, which is what a peft folder "
                "can hold. Leave `--adapters_only` out: the merged model has it."
            )
    for key in sorted(dict(network.named_buffers()).keys() & entries.keys()):
        name, _, buffer = key.rpartition(".")
        if buffer == "running_mean" and name not in whole:  # of a batch norm
            raise ValueError(
                f"`ckpt_path` has the running statistics of {name}, which training changes, and a peft folder holds no "
                "more than adapters and what was trained as a whole. Leave `--adapters_only` out: the merged model has "
                "them."
            )
    return whole


def _refuse_what_peft_reads_otherwise(network: nn.Module, config: Any, weights: Mapping[str, Tensor]) -> None:
    """Refuse a folder if peft, given its configuration, would look for other tensors in it.

    Names are ends of names to peft, and may mean more modules than were trained.

    Raises:
        ValueError: If it would.
    """
    from peft import get_peft_model, get_peft_model_state_dict

    with torch.device("meta"):
        adapted = get_peft_model(deepcopy(network), config)
    found = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    differ = sorted(shapes.items() ^ {(name, tuple(value.shape)) for name, value in weights.items()})
    if differ:
        raise ValueError(
            f"`ckpt_path` has adapters that peft can't read: it would look for others, such as {differ[0][0]}. Leave "
            "`--adapters_only` out: the merged model has what was trained."
        )
