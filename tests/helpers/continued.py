"""What a trained network makes of a prompt."""

from typing import Any

import torch


def continued(network: Any, tokenizer: Any, prompt: str, max_new_tokens: int = 8) -> str:
    """The prompt and its likeliest continuation, or an encoder-decoder's answer."""
    ids = tokenizer(prompt)["input_ids"]
    if network.config.is_encoder_decoder and ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    inputs = torch.tensor([ids])
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (output,) = network.eval().generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False, **ends
    )
    return str(tokenizer.decode(output, skip_special_tokens=True))
