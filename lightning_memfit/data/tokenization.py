"""Tokenizers: any of Hugging Face's, or a byte tokenizer, which needs no file and no network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes"
_EOS, _PAD = "<|endoftext|>", "<|pad|>"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer that knows where a document ends."""
    if name == BYTES:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"`tokenizer={name!r}` is neither a folder with a tokenizer nor could it be fetched from the Hugging Face "
            f"hub ({reason}). Give a local folder, or `tokenizer: bytes`, which needs no files."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"`tokenizer={name!r}` has no end-of-sequence token to put between documents.")
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of 258 tokens: the bytes (value is id), then end of text (256) and padding (257).

    It is a byte-level BPE without merges, so that it is saved and loaded like any other tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_EOS, pad_token=_PAD, clean_up_tokenization_spaces=False
    )


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether token ids are the bytes of the text."""
    return len(tokenizer) == 258 and tokenizer.eos_token == _EOS and tokenizer.pad_token == _PAD


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Encode documents as `tokenizer(text)` does, and end each with the end-of-sequence token.

    A model that was trained with a token at the beginning of every text (Llama 3, Gemma) gets it here, too, if its
    tokenizer puts it there.
    """
    dtype = token_dtype(len(tokenizer))
    before, after = (np.array(ids, dtype) for ids in surroundings(tokenizer))
    if is_byte_tokenizer(tokenizer):
        ids = [np.frombuffer(text.encode("utf-8"), np.uint8).astype(dtype) for text in texts]
    else:
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        ids = [np.asarray(one, dtype) for one in encoded]
    return [np.concatenate([before, one, after]) for one in ids]


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest type that holds every id: 2 bytes per token for most vocabularies."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that determines the ids, the same in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: dict[str, Any] = tokenizer.get_vocab()
    else:  # padding and truncation are those of the last call, and `encode` overrides them
        state = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
    # Templates write special tokens by their names (`bos_token`), whose texts the backend doesn't know as such.
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    identity = json.dumps(
        [type(tokenizer).__name__, state, tokenizer.eos_token_id, special, surroundings(tokenizer)], sort_keys=True
    )
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def surroundings(tokenizer: PreTrainedTokenizerBase, is_target: bool = False) -> tuple[list[int], list[int]]:
    """Return the special tokens before and behind a text of `tokenizer(text)`, and the end of sequence if it puts none.

    Args:
        tokenizer: Any with an end-of-sequence token.
        is_target: What `tokenizer(text_target=text)` puts around a text that is to be written.

    Raises:
        ValueError: If the tokenizer doesn't leave a text's own tokens together.
    """
    name = "text_target" if is_target else "text"
    for probe in _probes(tokenizer):
        ids, bare = (
            list(tokenizer(**{name: probe}, add_special_tokens=special, verbose=False)["input_ids"])
            for special in (True, False)
        )
        if not bare:
            continue
        start = next((at for at in range(len(ids)) if ids[at : at + len(bare)] == bare), None)
        if start is None:
            break
        before, after = ids[:start], ids[start + len(bare) :]
        end = tokenizer.eos_token_id
        return before, after if end in after else [*after, end]
    raise ValueError(
        f"`tokenizer`: {type(tokenizer).__name__} changes the tokens of a text when it puts special tokens around it, "
        "so that texts can't be cut to a length. Use another tokenizer."
    )


def _probes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Short texts, of which one has tokens in any vocabulary."""
    yield "a"
    special = set(tokenizer.all_special_ids)
    yield from (str(tokenizer.decode([token])) for token in range(min(len(tokenizer), 1000)) if token not in special)
