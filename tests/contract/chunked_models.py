"""Tiny language models of transformers, each of which gets from its head to its loss in another way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False, "max_position_embeddings": 128}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 128, "dropout": 0.0,
        "use_cache": False}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "use_cache": False,
      "decoder_start_token_id": 0}  # fmt: skip
SPEECH = {name: value for name, value in BART.items() if name != "max_position_embeddings"}


def _made(name: str, **options: Any) -> Callable[[int], nn.Module]:
    """A function of the size of the vocabulary. `name` is a model's class, whose configuration is found by itself."""

    def make(vocab_size: int = 64) -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
        model: nn.Module = cls(cls.config_class(**{"vocab_size": vocab_size, **special, **options}))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()  # zero, unless a checkpoint has another
        return model

    return make


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gemma2": _made("Gemma2ForCausalLM", **DECODER, final_logit_softcapping=3.0),
    "cohere": _made("CohereForCausalLM", **DECODER, logit_scale=0.3),
    "granite": _made("GraniteForCausalLM", **DECODER, logits_scaling=3.0),
    "bert": _made("BertForMaskedLM", **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "bart": _made("BartForConditionalGeneration", **BART),
    "marian": _made("MarianMTModel", **BART, decoder_start_token_id=1),
    "t5": _made("T5ForConditionalGeneration", **T5),
    "mt5 untied": _made("MT5ForConditionalGeneration", **T5, tie_word_embeddings=False),
    "whisper": _made("WhisperForConditionalGeneration", **SPEECH, num_mel_bins=8, max_source_positions=16,
                     decoder_start_token_id=0, max_target_positions=64),
    "xlnet": _made("XLNetLMHeadModel", d_model=32, n_layer=1, n_head=2, d_inner=48, dropout=0.0),
    "prophetnet": _made("ProphetNetForConditionalGeneration", hidden_size=32, encoder_ffn_dim=48, decoder_ffn_dim=48,
                        num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2, dropout=0.0,
                        num_decoder_attention_heads=2, attention_dropout=0.0, activation_dropout=0.0, ngram=2),
    "xlm": _made("XLMWithLMHeadModel", emb_dim=32, n_layers=1, n_heads=2, dropout=0.0, attention_dropout=0.0,
                 n_words=64),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in training mode and a batch, from fixed seeds."""
    torch.manual_seed(0)
    model = MODELS[name](64).train()
    ids = torch.randint(3, 64, (2, 12))
    labels = ids.clone()
    labels[0, :3] = -100
    labels[1, -2:] = -100
    if name == "whisper":
        return model, {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": ids, "labels": labels}
    return model, {"input_ids": ids, "labels": labels}
