"""Ten small models of different kinds for comparing batch size searches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES = 2048


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the micro-batch that shall be the largest to fit."""

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Tensor]
    largest: int
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW


class Lit(pl.LightningModule):
    """Trains a model on inputs and a class, or as a Hugging Face model on its own inputs."""

    def __init__(self, case: Case, batch_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.net = case.build()
        self.batch_size = batch_size
        self.num_steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (inputs,) = batch
        self.num_steps += 1
        if hasattr(self.net, "config"):
            if "bert" in self.case.name or "t5" in self.case.name:
                return self.net(input_ids=inputs, labels=inputs).loss
            return self.net(input_ids=inputs, labels=inputs, use_cache=False).loss
        return self.net(inputs).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        sample = self.case.sample(generator)
        data = sample.repeat(NUM_SAMPLES, *[1] * (sample.ndim - 1))
        return DataLoader(TensorDataset(data), self.batch_size)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 96)
        self.head = nn.Linear(96, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        state = inputs.new_zeros(len(inputs), 96)
        for step in inputs.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


def _mlp(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def _hugging_face(kind: str) -> nn.Module:
    import transformers as hf

    small = {"vocab_size": 199}
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, **small))
    if kind == "bert":
        config = hf.BertConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, **small
        )
        return hf.BertForMaskedLM(config)
    if kind == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(num_layers=2, d_model=64, d_kv=16, num_heads=4, d_ff=128, decoder_start_token_id=0, **small)
        )
    config = hf.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        **small,
    )
    return hf.LlamaForCausalLM(config)


def _floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(1, *shape, generator=generator)


def _tokens(length: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(1, 199, (1, length), generator=generator)


CASES = (
    Case("mlp-deep", lambda: _mlp(128, 8), _floats(128), 500),
    Case("mlp-wide", lambda: _mlp(512, 2), _floats(512), 333),
    Case("autoencoder-sgd", lambda: nn.Sequential(_mlp(256, 2), nn.Linear(256, 16), nn.Linear(16, 256)), _floats(256),
         412, torch.optim.SGD),
    Case("convolutions", _convolutions, _floats(3, 16, 16), 57),
    Case("encoder", _encoder, _floats(24, 64), 23),
    Case("recurrent", _Recurrent, _floats(12, 32), 171),
    Case("gpt2", lambda: _hugging_face("gpt2"), _tokens(48), 9),
    Case("bert", lambda: _hugging_face("bert"), _tokens(32), 41),
    Case("t5", lambda: _hugging_face("t5"), _tokens(24), 5),
    Case("llama", lambda: _hugging_face("llama"), _tokens(40), 1),
)  # fmt: skip
