"""Small modules of many kinds for `pairs`, none of which gave the planner its costs."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from benchmarks.training import WithAdamW
from lightning_memfit.models import CausalLM, Seq2SeqLM

SHARE = 16
"""Samples per optimizer step."""
_TOKENS = 32


def _language(**config: Any) -> tuple[pl.LightningModule, Any]:
    ids = torch.randint(0, 512, (SHARE, _TOKENS), generator=torch.Generator().manual_seed(0))
    return CausalLM(config=config), {"input_ids": ids, "labels": ids.clone()}


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


class UNet(WithAdamW):
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


class Recurrent(WithAdamW):
    """Language model of long short-term memory."""

    def __init__(self, width: int = 256, layers: int = 3, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.rnn(self.embed(batch["ids"]))[0])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


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


MODELS: dict[str, Callable[[], tuple[pl.LightningModule, Any]]] = {
    one.__name__: one for one in (t5, unet, qwen2, lstm, mixtral)
}
