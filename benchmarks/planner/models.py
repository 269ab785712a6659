"""Small modules of many kinds for `pairs`: what a plan is held against on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_memfit.models import CausalLM

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


MODELS: dict[str, Callable[[], tuple[pl.LightningModule, Any]]] = {
    "gpt2": gpt2,
    "gpt2_wide": gpt2_wide,
    "llama": llama,
    "perceptron": perceptron,
    "encoder": encoder,
}
