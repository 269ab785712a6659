"""Tiny models to checkpoint, with dropout, and a batch for each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


def gpt2(**kwargs: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    config = GPT2Config(**{**sizes, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, **kwargs})
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=3,
            hidden_size=32,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=64,
            use_cache=False,
            attention_dropout=0.1,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            num_layers=2,
            num_decoder_layers=3,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_heads=2,
            vocab_size=64,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=3,
            hidden_size=32,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            hidden_dropout_prob=0.1,
        )
    )


class Bottleneck(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out, momentum=None)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, out, 1), nn.BatchNorm2d(out)) if width != out else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.downsample(x)).relu()


class ResNet(nn.Module):
    """Stages as named attributes, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(*(Bottleneck(8, 8) for _ in range(3)))
        self.layer2 = nn.Sequential(Bottleneck(8, 16), *(Bottleneck(16, 16) for _ in range(4)))
        self.head = nn.Linear(16, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.layer2(self.layer1(self.stem(pixel_values))).mean((2, 3))
        return {"loss": nn.functional.cross_entropy(self.head(features), labels)}


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 16))
    return {"input_ids": ids, "labels": ids}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 2, (4,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpt2": (gpt2, _tokens),
    "llama": (llama, _tokens),
    "bert": (bert, _tokens),
    "t5": (t5, _tokens),
    "vit": (vit, _images),
    "resnet": (ResNet, _images),
}


QUICK = {"gpt2", "resnet"}
EVERY_MODEL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in MODELS]
"""For a test of each: `make test` takes one of tokens and one with buffers that training changes."""


def make(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Model in training mode and its batch, from fixed seeds."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    return build().train(), batch()


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss with dropout drawn from a fixed seed."""
    torch.manual_seed(7)
    return model(**batch)["loss"]
