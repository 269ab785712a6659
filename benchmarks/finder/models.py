"""Small models of different kinds for comparing batch size searches.

`CASES` are ten whose memory is linear in the batch. `CURVED` are others: quadratic, stepped, with shapes that grow
after the first batch, and steps that can't be traced because they depend on values or leave torch. `ON_CUDA` are large.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

NUM_SAMPLES = 2048


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the micro-batch that shall be the largest to fit."""

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Tensor]
    largest: int
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    longer: tuple[int, ...] = ()
    """How many times longer the second batch is, by dimension of a sample; `largest` is the largest size for it."""
    kind: str = "linear"
    share: int = 0
    """Samples of a batch, where others than usual."""


class Lit(pl.LightningModule):
    """Trains a model on inputs and a class, or as a Hugging Face model on its own inputs."""

    def __init__(self, case: Case, batch_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.net = case.build()
        self.batch_size = batch_size
        self.num_steps = 0
        self.largest_seen = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (inputs,) = batch
        self.num_steps += 1
        self.largest_seen = max(self.largest_seen, len(inputs))
        if hasattr(self.net, "config"):
            if "bert" in self.case.name or "t5" in self.case.name:
                return self.net(input_ids=inputs, labels=inputs).loss
            return self.net(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss = self.net(inputs).square().mean()
        if self.case.kind not in ("linear", "longer"):  # samples that depend on each other would be refused
            loss = 0.0 * loss + min(self.parameters(), key=torch.numel).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        sample = self.case.sample(generator)
        if self.case.longer:
            return DataLoader(_Longer(sample[0], self.batch_size, self.case.longer), self.batch_size)
        # Without a ragged batch, where peaks of few steps are compared.
        count = NUM_SAMPLES if self.case.kind == "linear" else 4 * self.batch_size
        data = sample.repeat(count, *[1] * (sample.ndim - 1))
        return DataLoader(TensorDataset(data), self.batch_size)


class _Longer(Dataset):
    """Equal samples; those of the second batch are longer."""

    def __init__(self, sample: Tensor, batch_size: int, times: tuple[int, ...]) -> None:
        self.sample, self.long, self.batch_size = sample, sample.repeat(*times), batch_size

    def __len__(self) -> int:
        return 4 * self.batch_size

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.long if index // self.batch_size == 1 else self.sample,)


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


def _convolutions(widths: tuple[int, ...] = (3, 16, 32, 32)) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def _hugging_face(kind: str) -> nn.Module:
    import transformers as hf

    small = {"vocab_size": 199}
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, **small))
    if kind == "large gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=8, n_embd=512, n_head=8, n_positions=256, vocab_size=1000))
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

SMALL_CASE = Case("perceptron", lambda: _mlp(64, 3), _floats(64), 0)
ON_CUDA = {
    Case("gpt2", lambda: _hugging_face("large gpt2"), _tokens(256), 0): 6 << 30,
    Case("perceptron", lambda: _mlp(4096, 8), _floats(4096), 0, share=2048): 4 << 30,
    Case(
        "convolutions",
        lambda: nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), _convolutions((64,) * 9)),
        _floats(3, 128, 128),
        0,
    ): 6 << 30,
}
"""Limits in bytes by case; `largest` is looked for."""


# --- memory that is not linear in the batch -------------------------------------------------------------------------


class _Between(nn.Module):
    """A body, and a function of the features of all samples."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 16))
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self.body(inputs))


def _attention(rows: Tensor) -> Tensor:
    return (rows @ rows.T / 4).softmax(-1) @ rows


def _distances(rows: Tensor) -> Tensor:
    return torch.cdist(rows, rows)


def _contrastive(rows: Tensor) -> Tensor:
    rows = nn.functional.normalize(rows)
    return nn.functional.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def _pairs(rows: Tensor) -> Tensor:
    return (rows[:, None] - rows[None]).tanh()


class _Padded(nn.Module):
    """Pads its batch to a multiple, as compiled and quantized kernels ask for, or to a power of two."""

    def __init__(self, multiple: int | None) -> None:
        super().__init__()
        self.multiple = multiple
        self.body = _mlp(64, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        count = len(inputs)
        padded = 1 << (count - 1).bit_length() if self.multiple is None else -(-count // self.multiple) * self.multiple
        return self.body(nn.functional.pad(inputs, (0, 0, 0, padded - count)))[:count]


class _Untraceable(nn.Module):
    """Runs a function on the features that a trace can't follow, then another module."""

    def __init__(self, leave: Callable[[Tensor], Tensor], then: nn.Module) -> None:
        super().__init__()
        self.leave, self.then = leave, then

    def forward(self, inputs: Tensor) -> Tensor:
        return self.then(self.leave(inputs))


def _through_ctypes(inputs: Tensor) -> Tensor:
    """Scaled by what C reads at the tensor's address."""
    first = ctypes.cast(inputs.contiguous().data_ptr(), ctypes.POINTER(ctypes.c_float))[0]
    return inputs * (1.0 + 1e-6 * first)


def _positive(inputs: Tensor) -> Tensor:
    """The samples that have a positive sum; in this data all or none, so that both signs are there."""
    both = torch.cat([inputs, -inputs])
    return both[both.flatten(1).sum(1) > 0]


def _unique(inputs: Tensor) -> Tensor:
    """As many samples as given, by indices that depend on values."""
    kept = torch.nonzero(inputs.abs().flatten(1).sum(1) >= 0).flatten()
    return inputs[kept]


CURVED = (
    Case("attention over the batch", lambda: _Between(_attention), _floats(32), 130, kind="quadratic"),
    Case("distances", lambda: _Between(_distances), _floats(32), 127, kind="quadratic"),
    Case("contrastive", lambda: _Between(_contrastive), _floats(32), 210, kind="quadratic"),
    Case("all pairs", lambda: _Between(_pairs), _floats(32), 30, kind="quadratic"),
    Case("padded to 16", lambda: _Padded(16), _floats(64), 48, kind="stepped"),
    Case("padded to 64", lambda: _Padded(64), _floats(64), 192, kind="stepped"),
    Case("padded to 2^n", lambda: _Padded(None), _floats(64), 64, kind="stepped"),
    Case("text, then longer", _encoder, _floats(24, 64), 11, longer=(3, 1), kind="longer"),
    Case("recurrent, then longer", _Recurrent, _floats(12, 32), 61, longer=(2, 1), kind="longer"),
    Case("images, then larger", _convolutions, _floats(3, 16, 16), 9, longer=(1, 2, 2), kind="longer"),
    Case("through C", lambda: _Untraceable(_through_ctypes, _mlp(64, 4)), _floats(64), 140, kind="untraceable"),
    Case("values choose samples", lambda: _Untraceable(_positive, _mlp(64, 4)), _floats(64), 57, kind="untraceable"),
    Case("values choose, attention", lambda: _Untraceable(_unique, _Between(_attention)), _floats(32), 111,
         kind="untraceable"),
    Case("through C, images", lambda: _Untraceable(_through_ctypes, _convolutions()), _floats(3, 16, 16), 33,
         kind="untraceable"),
    Case("through C, padded to 16", lambda: _Untraceable(_through_ctypes, _Padded(16)), _floats(64), 80,
         kind="untraceable"),
)  # fmt: skip
