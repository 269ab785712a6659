"""Continue a text with a Hugging Face model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_memfit.models.architecture import is_encoder_decoder, max_positions
from lightning_memfit.special_tokens import surroundings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_text(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
) -> str:
    """Return the prompt and its continuation, or an encoder-decoder model's answer; the training mode is kept.

    Args:
        network: Any language model.
        tokenizer: The tokenizer that it was trained with.
        prompt: Text to continue; an empty one starts a new document. An encoder-decoder model reads it.
        max_new_tokens: Maximum number of tokens to add.
        temperature: Temperature of the sampling; 0 takes the likeliest token each time.
        top_k: Number of likeliest tokens to sample from.

    Raises:
        ValueError: If a number is out of range, or prompt and continuation exceed the model's positions.
    """
    before, after = surroundings(tokenizer)  # as the data modules have them
    ids = [*before, *tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]]
    answers = is_encoder_decoder(network.config)
    if answers:
        ids = [*ids, *after]
    elif not ids:
        ids = [tokenizer.eos_token_id]  # what stood before a document's first token in training
    added = continue_ids(network, tokenizer, ids, max_new_tokens, temperature, top_k)
    return str(tokenizer.decode(added if answers else [*ids, *added], skip_special_tokens=True))


@torch.no_grad()
def continue_ids(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
) -> list[int]:
    """Return the tokens that a model adds to others, up to an end; the training mode is kept.

    Args:
        network: Any language model.
        tokenizer: The tokenizer that it was trained with.
        ids: Tokens to continue, or those that an encoder reads; at least one.
        max_new_tokens: Maximum number of tokens to add.
        temperature: Temperature of the sampling; 0 takes the likeliest token each time.
        top_k: Number of likeliest tokens to sample from.

    Raises:
        ValueError: If a number is out of range, or prompt and continuation exceed the model's positions.
    """
    check_sampling(max_new_tokens, temperature, top_k)
    answers = is_encoder_decoder(network.config)
    positions = max_positions(network.config)
    longest = max(len(ids), max_new_tokens) if answers else len(ids) + max_new_tokens
    if positions is not None and longest > positions:
        raise ValueError(
            f"The prompt's {len(ids)} tokens and `max_new_tokens={max_new_tokens}` exceed the model's {positions} "
            f"positions. Set `max_new_tokens` to at most {max(0, positions - len(ids))}, or shorten the prompt."
        )
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    inputs = torch.tensor([list(ids)], device=network.device)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    was_training = network.training
    network.eval()
    try:
        generate: Any = network.generate  # typed as a tensor by torch's `Module.__getattr__`
        output = generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=padding,
            use_cache=True,
            **sampling,
        )
    finally:
        network.train(was_training)
    added: list[int] = output[0].tolist()
    return added if answers else added[len(ids) :]


def check_sampling(max_new_tokens: int, temperature: float, top_k: int) -> None:
    """Refuse numbers with which nothing can be sampled.

    Raises:
        ValueError: If one is out of range.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k)):
        if value < 1:
            raise ValueError(f"`{name}={value}` must be at least 1.")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"`temperature={temperature}` must be a number from 0 on; 0 takes the likeliest token.")
