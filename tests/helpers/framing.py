"""Tokenizers of bytes that put special tokens around a text, as those of pretrained models do."""

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from lightning_memfit.data.tokenization import byte_tokenizer

BOS, EOS, PAD = 258, 256, 257


def framed(tokenizer: PreTrainedTokenizerFast, pattern: str) -> PreTrainedTokenizerFast:
    """Let a tokenizer put special tokens around a text, which is `$A`: `<|bos|> $A`."""
    tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in pattern.split() if token != "$A"]
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=tokens)
    return tokenizer


def with_bos(pattern: str = "<|bos|> $A") -> PreTrainedTokenizerFast:
    """Bytes with a beginning of sequence, 258."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    return framed(tokenizer, pattern)


class Translating(PreTrainedTokenizerFast):
    """Writes the language before a text, as those of NLLB and mBART-50 do."""

    _src_lang, tgt_lang = "eng", None

    @property
    def src_lang(self) -> str:
        return self._src_lang

    @src_lang.setter
    def src_lang(self, value: str) -> None:
        self._src_lang = value
        self._switch_to_input_mode()

    def _switch_to_input_mode(self) -> None:
        framed(self, f"{self.src_lang} $A <|endoftext|>")

    def _switch_to_target_mode(self) -> None:
        if self.tgt_lang is None:  # so do NLLB's
            self.tgt_lang = self.src_lang
        framed(self, f"{self.tgt_lang} $A <|endoftext|>")


def translating() -> Translating:
    """Bytes with the languages `eng` and `deu`, 258 and 259."""
    plain = byte_tokenizer()
    tokenizer = Translating(
        tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token, pad_token=plain.pad_token
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["eng", "deu"]})
    tokenizer._switch_to_input_mode()
    return tokenizer
