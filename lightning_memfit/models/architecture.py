"""Find and build Hugging Face models, with one clear error for everything that can be missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_FREE_FORM = {"model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
_ENCODER_DECODER = {"decoder_start_token_id"}
"""Entries that encoder-decoders read but that not all of their configs have by default, as T5's."""


def resolve_config(
    pretrained: str | None, config_name: str | None, config: Mapping[str, Any] | None
) -> PretrainedConfig:
    """Return the architecture, with the entries of `config` replacing those of a named one.

    Args:
        pretrained: Hub name or local folder of a model whose weights will be loaded.
        config_name: Hub name or local folder whose architecture is built with random weights.
        config: Inline architecture (with its `model_type`), or changes to the named one.

    Raises:
        ValueError: If nothing or too much is named, an entry is unknown, or the hub or folder cannot be read.
    """
    from transformers import AutoConfig

    if pretrained is not None and config_name is not None:
        raise ValueError(
            f"`pretrained={pretrained!r}` and `config_name={config_name!r}` name two models. Set `pretrained: null` to "
            "train the architecture of `config_name` from random weights."
        )
    changes = dict(config or {})
    named = pretrained or config_name
    if named is None:
        return _inline_config(changes)
    argument = "pretrained" if pretrained else "config_name"
    with _readable(argument, named):
        base: PretrainedConfig = AutoConfig.from_pretrained(_local_or_hub(argument, named), trust_remote_code=False)
    given_type = changes.pop("model_type", base.model_type)
    if given_type != base.model_type:
        raise ValueError(
            f"`config.model_type={given_type!r}` contradicts `{argument}={named!r}`, a {base.model_type!r} model."
        )
    _check_keys(changes, base)
    base.update({base.attribute_map.get(key, key): value for key, value in changes.items()})
    return base


def build(config: PretrainedConfig, pretrained: str | None, attn_implementation: str | None) -> PreTrainedModel:
    """Build the model once, in torch's default dtype (which Lightning's `*-true` precisions set), without an fp32 copy.

    Args:
        config: The architecture.
        pretrained: Hub name or local folder of the weights; None for random ones.
        attn_implementation: `sdpa`, `eager` or `flash_attention_2`; None for what transformers chooses.

    Raises:
        ValueError: If the weights cannot be read, or transformers refuses the architecture.
    """
    options: dict[str, Any] = {"dtype": torch.get_default_dtype(), "attn_implementation": attn_implementation}
    network: PreTrainedModel
    if pretrained is None:
        try:
            network = auto_class(config).from_config(config, **options)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"`config`: transformers can't build this {config.model_type!r} model: {reason}."
            ) from error
    else:
        options |= {"use_safetensors": True, "trust_remote_code": False}
        with _readable("pretrained", pretrained):
            network = auto_class(config).from_pretrained(
                _local_or_hub("pretrained", pretrained), config=config, **options
            )
    network.config.use_cache = False  # keys and values of past tokens, which training never reads
    if not is_encoder_decoder(config) and type(network).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        network.loss_type = "ForCausalLM"  # GPT-2's class is named otherwise, and transformers would warn
    return network


def is_encoder_decoder(config: PretrainedConfig) -> bool:
    """Whether the model has an encoder, which reads a text, and a decoder, which writes one."""
    return bool(getattr(config, "is_encoder_decoder", False))


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds and loads language models of this architecture."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if is_encoder_decoder(config) else AutoModelForCausalLM


def max_positions(config: PretrainedConfig) -> int | None:
    """Longest sequence in tokens that the architecture has positions for; None if it has no such bound."""
    config = config.get_text_config()  # of models that see or hear as well
    named = getattr(config, "max_position_embeddings", None)
    return getattr(config, "max_target_positions", None) if named is None else named


def _inline_config(entries: dict[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    if not entries:
        raise ValueError(
            "`pretrained`, `config_name` and `config` are all empty. Name a model with `pretrained`, or an "
            "architecture with `config_name` or an inline `config: {model_type: gpt2, ...}`."
        )
    model_type = entries.get("model_type")
    if model_type is None:
        raise ValueError(f"`config={entries}` lacks `model_type`, for example `model_type: gpt2`.")
    try:
        defaults = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ValueError(f"`config.model_type={model_type!r}` is unknown to transformers.") from error
    _check_keys(entries, defaults)
    return AutoConfig.for_model(**entries)


def _check_keys(entries: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Refuse misspelt entries, which transformers would store but never read."""
    known = {*config.to_dict(), *config.attribute_map} | _FREE_FORM
    if is_encoder_decoder(config):
        known |= _ENCODER_DECODER
    for key in entries:
        if key not in known:
            closest = difflib.get_close_matches(key, known, n=3) or sorted(known)
            raise ValueError(
                f"`config.{key}` is no entry of a {config.model_type!r} architecture. Closest: {', '.join(closest)}."
            )


def _local_or_hub(argument: str, name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"`{argument}={name!r}` is a path, but there is no such folder.")
    return name


@contextmanager
def _readable(argument: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        if Path(name).expanduser().is_dir():
            raise ValueError(f"`{argument}={name!r}` is not a complete Hugging Face model folder: {reason}") from error
        raise ValueError(
            f"`{argument}={name!r}` is neither a local folder nor could it be fetched from the Hugging Face hub "
            f"({reason}). On a machine with network, run `hf download {name} --local-dir FOLDER`, bring the folder "
            f"here and set `{argument}: FOLDER`; or train from random weights with `pretrained: null` and `config`."
        ) from error
