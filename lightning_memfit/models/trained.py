"""Trained models on disk: read them from a training checkpoint, export them to a Hugging Face folder."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memfit.adapters.checkpoint import KEY as ADAPTERS
from lightning_memfit.adapters.checkpoint import merged_state_dict, write_peft_folder
from lightning_memfit.memory.collectives import is_divided, on_first_rank, whole_state_dict
from lightning_memfit.models.architecture import auto_class, is_encoder_decoder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURE_KEY = "memfit_architecture"
GENERATION_KEY = "memfit_generation"
_PREFIX = "model."


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a single-file checkpoint of a `CausalLM` onto the CPU, memory-mapped.

    Raises:
        ValueError: If there is no such file, or it is not a checkpoint of a `CausalLM`.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"`ckpt_path={str(path)!r}` is a sharded checkpoint folder. Consolidate it first.")
    if not file.is_file():
        raise ValueError(f"`ckpt_path={str(path)!r}`: there is no such file.")
    try:
        checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise ValueError(
            f"`ckpt_path={str(path)!r}` holds more than tensors and plain values: loading it could run any code, and "
            "nothing of it was loaded."
        ) from error
    except RuntimeError as error:
        raise ValueError(f"`ckpt_path={str(path)!r}` is damaged, or `torch.save` did not write it.") from error
    if ARCHITECTURE_KEY not in checkpoint:
        raise ValueError(f"`ckpt_path={str(path)!r}` is not a checkpoint of a CausalLM.")
    return checkpoint


def network_from_checkpoint(checkpoint: dict[str, Any]) -> PreTrainedModel:
    """Build the trained network in evaluation mode and in its saved precision, without asking the hub.

    Adapters are merged into the pretrained model that they belong to, which is loaded in its own precision.

    Args:
        checkpoint: What `load_checkpoint` returned.
    """
    from transformers import GenerationConfig

    if ADAPTERS in checkpoint:
        return _merged_network(checkpoint)
    config = _architecture_of(checkpoint)
    weights = {k.removeprefix(_PREFIX): v for k, v in checkpoint["state_dict"].items() if k.startswith(_PREFIX)}
    dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    network: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    network.load_state_dict(weights)
    if GENERATION_KEY in checkpoint:
        network.generation_config = GenerationConfig.from_dict(checkpoint[GENERATION_KEY])
    network.eval()
    return network


def _architecture_of(checkpoint: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration that the network was built from."""
    from transformers import AutoConfig

    entries = checkpoint[ARCHITECTURE_KEY]
    config: PretrainedConfig = type(AutoConfig.for_model(entries["model_type"])).from_dict(entries)
    return config


def _merged_network(checkpoint: dict[str, Any]) -> PreTrainedModel:
    """Return the pretrained network with the checkpoint's adapters merged into it, in its own precision."""
    config, pretrained = _architecture_of(checkpoint), checkpoint["hyper_parameters"].get("pretrained")
    if pretrained is None:
        raise ValueError(
            "`ckpt_path` holds adapters alone, for a model that began with random weights: these are nowhere. Train "
            "adapters of a model with `pretrained`, or export from Python when the run ends (`CausalLM.export`)."
        )
    config.dtype = None  # that of the training; `auto` means that of the weights then
    network: PreTrainedModel = auto_class(config).from_pretrained(
        pretrained, config=config, dtype="auto", use_safetensors=True, trust_remote_code=False
    )
    network.load_state_dict(merged_state_dict(network, _of_network(checkpoint)))
    network.eval()
    return network


def _of_network(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of adapters by the names that the network gives its weights."""
    record, entries = checkpoint[ADAPTERS], checkpoint["state_dict"]
    return {
        ADAPTERS: {**record, "layers": [name.removeprefix(_PREFIX) for name in record["layers"]]},
        "state_dict": {name.removeprefix(_PREFIX): value for name, value in entries.items()},
    }


def export_adapters(checkpoint: dict[str, Any], folder: str | Path) -> Path:
    """Write a checkpoint's adapters in the format that `peft.PeftModel.from_pretrained` reads.

    Args:
        checkpoint: What `load_checkpoint` returned.
        folder: Folder to write; created if missing.

    Raises:
        ValueError: If the checkpoint has no adapters, the folder is not empty, or peft can't read all that was trained.
    """
    if ADAPTERS not in checkpoint:
        raise ValueError("`ckpt_path` holds no adapters. Leave `--adapters_only` out.")
    config = _architecture_of(checkpoint)
    with torch.device("meta"):
        network = auto_class(config).from_config(config)
    target = new_folder(folder)
    task = "SEQ_2_SEQ_LM" if is_encoder_decoder(config) else "CAUSAL_LM"
    base = checkpoint["hyper_parameters"].get("pretrained")
    write_peft_folder(target, _of_network(checkpoint), network, base, task)
    return target


def new_folder(folder: str | Path) -> Path:
    """Make a folder to write into, and return it.

    Raises:
        ValueError: If it can't be made, or has something in it.
    """
    target = Path(folder).expanduser()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"`folder={str(folder)!r}` is not empty. Name a new folder: nothing is overwritten.")
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a link to nowhere, a file on the way, no permission
        raise ValueError(f"`folder={str(folder)!r}` can't be made ({error}). Name a new folder.") from error
    return target


def _written(own: GenerationConfig, folder: Path) -> GenerationConfig:
    """Write how a network generates, without what transformers refuses to write; return what was written.

    Where nothing is sampled, older models often have settings of sampling, which transformers reads and ignores.
    """
    try:
        own.save_pretrained(folder)
        return own
    except ValueError as error:
        if own.do_sample:
            raise ValueError(f"`network.generation_config` can't be exported: {error}") from error
    greedy = deepcopy(own)
    for name in _OF_SAMPLING:
        setattr(greedy, name, None)
    greedy.save_pretrained(folder)
    rank_zero_warn(
        "The exported model lacks its settings of sampling: without `do_sample=True` they have no effect, and "
        "transformers refuses to write them."
    )
    return greedy


_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def export_folder(network: PreTrainedModel, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Write a Hugging Face folder that `from_pretrained` loads again, with the weights gathered from all ranks.

    Of several ranks the first one writes. Where they divide the weights, under ZeRO-3, FSDP2 or tensor parallelism, all
    of them have to come, and return when the folder is complete; else the others return at once.

    Args:
        network: The model.
        folder: Folder to write; created if missing.
        tokenizer: Tokenizer to write into the same folder; None writes none.

    Raises:
        ValueError: If the folder is not empty, or the weights can't be made whole.
    """
    divided = is_divided(network)
    on_first_rank(partial(new_folder, folder), divided)
    target = Path(folder).expanduser()
    weights = whole_state_dict(network) if divided else None
    on_first_rank(partial(_write_network, network, tokenizer, target, weights), divided)
    return target


def _write_network(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, target: Path, weights: dict[str, Any] | None
) -> None:
    was_cached, generation = network.config.use_cache, getattr(network, "generation_config", None)
    network.config.use_cache = True  # off only for training
    if generation is not None:  # only what generates has one
        network.generation_config = _written(generation, target)
    try:
        network.save_pretrained(target, state_dict=weights)
    finally:
        network.config.use_cache = was_cached
        if generation is not None:
            network.generation_config = generation
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
