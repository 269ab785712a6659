"""Six small modules of different kinds with data: text, encoder-decoder, vision, recurrent, contrastive, tabular."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

SAMPLES, BATCHES = 8, 3
"""Samples per batch, and batches."""


class Small(pl.LightningModule):
    """A network, and the optimizer that `make_optimizer` makes of what is trained."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


class Text(Small):
    """A causal language model of transformers."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        super().__init__(LlamaForCausalLM(config))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss


class Translation(Small):
    """An encoder-decoder of transformers."""

    def __init__(self) -> None:
        from transformers import BartConfig, BartForConditionalGeneration

        names = ("dropout", "attention_dropout", "activation_dropout")
        config = BartConfig(
            vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
            **dict.fromkeys(names, 0.0),
        )  # fmt: skip
        super().__init__(BartForConditionalGeneration(config))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        return loss


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(x)
        return found


class Vision(Small):
    """A small U-Net: what each stage found skips to its counterpart."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList([_Residual(16) for _ in range(3)])
        self.up = nn.ModuleList([_Residual(16) for _ in range(3)])
        self.mix = nn.Linear(16, 16)
        self.head = nn.Conv2d(16, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, target = batch
        x = self.stem(images)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop())
        x = self.mix(x.movedim(1, -1)).movedim(-1, 1)
        return F.mse_loss(self.head(x), target)


class Recurrent(Small):
    """A GRU cell in a loop, trained by SGD with momentum."""

    def __init__(self) -> None:
        super().__init__(
            nn.ModuleDict({"cell": nn.GRUCell(8, 32), "deep": nn.Linear(32, 32), "head": nn.Linear(32, 5)})
        )
        self.make_optimizer = _sgd

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        parts: Any = self.net
        state = inputs.new_zeros(len(inputs), 32)
        for value in inputs.unbind(1):
            state = parts["cell"](value, state)
        return F.cross_entropy(parts["head"](torch.tanh(parts["deep"](state))), target)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Contrastive(Small):
    """Two towers whose samples are told apart from those of their batch."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"one": _tower(12), "other": _tower(20)}))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        parts: Any = self.net
        first, second = F.normalize(parts["one"](batch[0])), F.normalize(parts["other"](batch[1]))
        return F.cross_entropy(first @ second.t() / 0.2, torch.arange(len(first)))


def _tower(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 16))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 80), nn.Linear(80, 40)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.second(F.gelu(self.first(x)))
        return found


class Tabular(Small):
    """Embedded categories and numbers through equal blocks in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*[_Layer() for _ in range(4)]))
        self.categories = nn.Embedding(200, 32)
        self.head = nn.Linear(40, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        categories, numbers, target = batch
        x = torch.cat([self.categories(categories).mean(1), numbers], 1)
        return F.mse_loss(self.head(self.net(x)).squeeze(1), target)


MODULES: dict[str, type[Small]] = {
    "text": Text,
    "encoder-decoder": Translation,
    "vision": Vision,
    "recurrent": Recurrent,
    "contrastive": Contrastive,
    "tabular": Tabular,
}


def build(name: str) -> Small:
    """A new module with always the same weights."""
    torch.manual_seed(0)
    return MODULES[name]()  # type: ignore[call-arg]


def loader(name: str) -> DataLoader[Any]:
    """The training data of a module, in order."""
    generator = torch.Generator().manual_seed(1)
    count = SAMPLES * BATCHES

    def floats(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    def tokens(length: int, largest: int = 97) -> Tensor:
        return torch.randint(3, largest, (count, length), generator=generator)

    data: list[Any]
    if name == "text":
        data = list(tokens(12))
    elif name == "encoder-decoder":
        data = [{"input_ids": a, "labels": b} for a, b in zip(tokens(10), tokens(7), strict=True)]
    elif name == "vision":
        data = list(zip(floats(3, 8, 8), floats(3, 8, 8), strict=True))
    elif name == "recurrent":
        data = list(zip(floats(6, 8), tokens(1, 5).squeeze(1) - 2, strict=True))
    elif name == "contrastive":
        data = list(zip(floats(12), floats(20), strict=True))
    else:
        data = list(zip(tokens(3, 200), floats(8), floats(), strict=True))
    return DataLoader(data, batch_size=SAMPLES)  # type: ignore[arg-type]
