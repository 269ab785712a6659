"""Small modules of many kinds for `pairs`: what a plan is held against on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_memfit.models import CausalLM, Seq2SeqLM

SHARE = 16
"""Samples per optimizer step."""
_TOKENS = 32


def _language(**config: Any) -> tuple[pl.LightningModule, Any]:
    ids = torch.randint(0, 512, (SHARE, _TOKENS), generator=torch.Generator().manual_seed(0))
    return CausalLM(config=config), {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> tuple[pl.LightningModule, Any]:
    return _language(model_type="gpt2", n_layer=6, n_embd=192, n_head=3, vocab_size=512, n_positions=_TOKENS)


def gpt2_wide() -> tuple[pl.LightningModule, Any]:
    return _language(model_type="gpt2", n_layer=3, n_embd=384, n_head=6, vocab_size=4096, n_positions=_TOKENS)


def llama() -> tuple[pl.LightningModule, Any]:
    return _language(
        model_type="llama",
        num_hidden_layers=4,
        hidden_size=192,
        intermediate_size=512,
        num_attention_heads=3,
        vocab_size=512,
        max_position_embeddings=_TOKENS,
    )


class Perceptron(pl.LightningModule):
    """Blocks of two linear layers."""

    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.blocks(batch["x"])), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Encoder(pl.LightningModule):
    """Transformer encoder over patches, as in BERT and ViT."""

    def __init__(self, width: int = 192, layers: int = 6, patch: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(patch, width)
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.encoder(self.embed(batch["x"])).mean(1))
        return nn.functional.cross_entropy(logits, batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def perceptron() -> tuple[pl.LightningModule, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHARE * 16, 256, generator=generator)
    x = x.reshape(SHARE, 16, 256)
    return Perceptron(), {"x": x, "y": x.mean(-1, keepdim=True)}


def encoder() -> tuple[pl.LightningModule, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHARE, _TOKENS, 48, generator=generator)
    return Encoder(), {"x": x, "y": torch.randint(0, 10, (SHARE,), generator=generator)}


def t5() -> tuple[pl.LightningModule, Any]:
    """Encoder-decoder with weights shared by both embeddings and the head, and sources longer than targets."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(2, 512, (SHARE, 2 * _TOKENS), generator=generator)
    target = torch.randint(2, 512, (SHARE, _TOKENS), generator=generator)
    module = Seq2SeqLM(
        config={
            "model_type": "t5",
            "num_layers": 4,
            "num_decoder_layers": 4,
            "d_model": 192,
            "d_kv": 64,
            "d_ff": 512,
            "num_heads": 3,
            "vocab_size": 512,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        }
    )
    return module, {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}


class Residual(nn.Module):
    """Two convolutions beside a skip, as in ResNet and in diffusion models; groups make samples independent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(nn.functional.silu(self.norms[0](x)))
        return x + self.second(nn.functional.silu(self.norms[1](hidden)))


class UNet(pl.LightningModule):
    """Predicts the noise in images; what each level has computed skips to the way up."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 96), depth: int = 2) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.enter = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(nn.Sequential(*map(Residual, depth * [width])) for width in widths)
        self.narrow = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.merge = nn.ModuleList(nn.Conv2d(2 * a, a, 1) for a, _ in pairs)
        self.up = nn.ModuleList(nn.Sequential(*map(Residual, depth * [width])) for width in widths[:-1])
        self.leave = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.down[0](self.enter(x)), []
        for narrow, down in zip(self.narrow, self.down[1:], strict=True):
            skips.append(x)
            x = down(narrow(x))
        for level in reversed(range(len(skips))):
            x = torch.cat([self.widen[level](x), skips[level]], dim=1)
            x = self.up[level](self.merge[level](x))
        return self.leave(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch["x"] + batch["noise"]), batch["noise"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def unet() -> tuple[pl.LightningModule, Any]:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(SHARE, 3, 32, 32, generator=generator) for _ in range(2))
    return UNet(), {"x": x, "noise": noise}


def qwen2() -> tuple[pl.LightningModule, Any]:
    """Grouped-query attention: four heads share one key and value."""
    return _language(
        model_type="qwen2",
        num_hidden_layers=5,
        hidden_size=192,
        intermediate_size=640,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=1024,
        tie_word_embeddings=True,
        max_position_embeddings=_TOKENS,
    )


class Recurrent(pl.LightningModule):
    """Language model of long short-term memory."""

    def __init__(self, width: int = 256, layers: int = 3, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.rnn(self.embed(batch["ids"]))[0])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def lstm() -> tuple[pl.LightningModule, Any]:
    generator = torch.Generator().manual_seed(0)
    return Recurrent(), {"ids": torch.randint(0, 1024, (SHARE, 2 * _TOKENS), generator=generator)}


def mixtral() -> tuple[pl.LightningModule, Any]:
    """Mixture of experts: every token goes through two of four."""
    return _language(
        model_type="mixtral",
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=512,
        max_position_embeddings=_TOKENS,
    )


@dataclass(frozen=True)
class ModelSet:
    """Models, and the limits that each is planned for, as shares of its plain setting's measured peak."""

    models: dict[str, Callable[[], tuple[pl.LightningModule, Any]]]
    limits: tuple[float, ...]
    file: str
    """Name of the file of its results."""


SETS: dict[str, ModelSet] = {
    "known": ModelSet(
        {one.__name__: one for one in (gpt2, gpt2_wide, llama, perceptron, encoder)},
        (0.35, 0.42, 0.5, 0.7, 1.05),
        "planner_pairs.json",
    ),
    "held_out": ModelSet(
        {one.__name__: one for one in (t5, unet, qwen2, lstm, mixtral)},
        (0.4, 0.46, 0.53, 0.6, 0.68, 0.78, 0.9, 1.05),
        "planner_pairs_held_out.json",
    ),
}
"""`known` are the kinds of modules with which the planner's costs were found, `held_out` are others."""
