"""The runs: strategies, models and techniques, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.training import OwnLoss, WithAdamW

TOKENS, ROWS = 64, 4

Made = tuple[pl.LightningModule, Any]


ZERO: dict[str, dict[str, Any]] = {
    "zero 1": {"stage": 1},
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3},
    "zero 1 offload": {"stage": 1, "offload_optimizer": True},
    "zero 2 offload": {"stage": 2, "offload_optimizer": True},
    "zero 3 offload optimizer": {"stage": 3, "offload_optimizer": True},
    "zero 3 offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "zero infinity optimizer": {"offload_parameters": False},
    "zero infinity parameters": {"offload_optimizer": False},
    "zero infinity": {},
}
"""Arguments of DeepSpeed's strategies: those of `ZeroInfinityStrategy` by what is on disk, or else both."""


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    strategy: str
    """`ddp`, `fsdp2`, `hybrid` (two copies), `tp` (two ranks a block), `tp x hybrid`, or one of `ZERO`."""
    world_size: int
    rank: int = 0
    """The rank that is compared: under DeepSpeed the one that needs most, in stages 1 and 2 the last one as a rule."""
    techniques: tuple[str, ...] = ()
    precision: Any = "32-true"
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the strategy."""
    width: int = 128
    """Of the model. DeepSpeed has buffers of a million elements at least, which small models don't fill."""
    tokens: int = TOKENS
    """Of each of a Llama's sequences."""

    @property
    def name(self) -> str:
        """What distinguishes it."""
        extra = [f"width {self.width}"] * (self.width != 128)
        extra += [f"{self.tokens} tokens"] * (self.tokens != TOKENS)
        extra += [*self.techniques, *([self.precision] if self.precision != "32-true" else [])]
        extra += [f"{self.accumulate} accumulated"] * (self.accumulate > 1)
        extra += [f"{key}={value}" for key, value in self.options.items()]
        parts = [self.model, self.strategy, f"{self.world_size} ranks", f"rank {self.rank}", *extra]
        return ", ".join(parts)

    @property
    def under_deepspeed(self) -> bool:
        """Whether DeepSpeed runs it, whose ranks are estimated in closed form."""
        return self.strategy in ZERO

    @property
    def to_disk(self) -> bool:
        """Whether ZeRO-Infinity keeps a part on disk."""
        return self.strategy.startswith("zero infinity")

    def make_strategy(self, folder: str = ".") -> Any:
        """The strategy, anew.

        Args:
            folder: Where ZeRO-Infinity keeps what is on disk.
        """
        from lightning_memfit.strategies import (
            DataParallelStrategy,
            FullyShardedStrategy,
            ZeroInfinityStrategy,
            ZeroStrategy,
        )

        if self.strategy == "ddp":
            return DataParallelStrategy(process_group_backend="gloo", **self.options)
        if self.under_deepspeed:
            options = {"process_group_backend": "gloo", **ZERO[self.strategy], **self.options}
            if self.to_disk:
                # A measurement of the drive would choose other buffers in every run.
                return ZeroInfinityStrategy(folder, config={"aio": {"block_size": 1 << 20}}, **options)
            return ZeroStrategy(**options)
        sizes: dict[str, dict[str, Any]] = {
            "fsdp2": {},
            "hybrid": {"sharding_size": self.world_size // 2},
            "tp": {"tensor_parallel_size": 2},
            "tp x hybrid": {"tensor_parallel_size": 2, "sharding_size": 2},
        }
        return FullyShardedStrategy(process_group_backend="gloo", **sizes[self.strategy], **self.options)

    def make_callbacks(self) -> tuple[Any, ...]:
        """The techniques' callbacks, anew."""
        from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
        from lightning_memfit.techniques.chunked_loss import ChunkedLoss
        from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit

        made: dict[str, Callable[[], Any]] = {
            "checkpointing": ActivationCheckpointing,
            "chunked loss": lambda: ChunkedLoss(num_chunks=4),
            "8 bit": Optimizer8bit,
        }
        return tuple(made[name]() for name in self.techniques)

    def make(self) -> Made:
        """The module and a batch."""
        torch.manual_seed(0)
        return _llama(self.width, self.tokens) if self.model == "Llama" else MODELS[self.model](self.width)


class Perceptron(WithAdamW):
    """Large layers and few activations. Gradients decide its peak, which comes late in backward."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        wide = [torch.nn.Linear(4 * width, 4 * width) for _ in range(10)]
        first, last = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, 1)
        self.layers = torch.nn.Sequential(first, *wide, torch.nn.ReLU(), last)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).mean()
        return loss


class SmallConvNet(WithAdamW):
    """Convolutions that grow, and a linear layer with more weights than all of them."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for channels, more in pairwise([3, width // 4, width // 2, width]):
            layers += [torch.nn.Conv2d(channels, more, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        self.convolutions = torch.nn.Sequential(*layers)
        self.head = torch.nn.Sequential(torch.nn.Linear(width * 16, 2 * width + 1), torch.nn.Linear(2 * width + 1, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.head(self.convolutions(images).flatten(1)), labels)


class GatedRecurrence(WithAdamW):
    """An LSTM written out, whose largest parameter is its embedding with an odd number of elements."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1031, 3 * width + 1)
        self.inputs = torch.nn.Linear(3 * width + 1, 4 * width)
        self.recurrent = torch.nn.Linear(width, 4 * width, bias=False)
        self.head = torch.nn.Linear(width, 1031)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        inputs = self.inputs(self.embedding(batch))
        hidden = cell = inputs.new_zeros(len(batch), self.recurrent.in_features)
        outputs = []
        for at in range(batch.shape[1] - 1):
            keep, take, show, new = (inputs[:, at] + self.recurrent(hidden)).chunk(4, dim=1)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            hidden = show.sigmoid() * cell.tanh()
            outputs.append(hidden)
        scores = self.head(torch.stack(outputs, 1))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


def _language_model(config: dict[str, Any], tokens: int = TOKENS) -> Made:
    from lightning_memfit.models import CausalLM

    ids = torch.randint(3, config["vocab_size"], (ROWS, tokens))
    return CausalLM(pretrained=None, config=config), {"input_ids": ids, "labels": ids.clone()}


def _gpt2(width: int) -> Made:
    size = {"n_positions": TOKENS, "n_embd": width, "n_layer": 4, "n_head": 4}
    return _language_model({"model_type": "gpt2", "vocab_size": 259, **size})


def _llama(width: int, tokens: int = TOKENS) -> Made:
    size = {"hidden_size": width, "intermediate_size": width * 43 // 16, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return _language_model(
        {"model_type": "llama", "vocab_size": 1024, "max_position_embeddings": tokens, **size, **heads}, tokens
    )


def _t5(width: int) -> Made:
    from lightning_memfit.models import Seq2SeqLM

    size = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_layers": 3, "num_heads": 4}
    config = {"model_type": "t5", "vocab_size": 258, **size}
    ids = torch.randint(3, 258, (ROWS, TOKENS))
    module = Seq2SeqLM(pretrained=None, config=config)
    module.architecture.decoder_start_token_id = 0  # it has no argument for it
    return module, {"input_ids": ids, "labels": ids.clone()}


def _vit(width: int) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 4 * width}
    config = ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10)  # type: ignore[arg-type]
    module = OwnLoss(ViTForImageClassification(config))
    return module, {"pixel_values": torch.rand(ROWS, 3, 64, 64), "labels": torch.randint(0, 10, (ROWS,))}


def _mlp(width: int) -> Made:
    return Perceptron(width), torch.rand(ROWS, width)


def _conv_net(width: int) -> Made:
    return SmallConvNet(width), (torch.rand(ROWS, 3, 32, 32), torch.randint(0, 10, (ROWS,)))


def _lstm(width: int) -> Made:
    return GatedRecurrence(width), torch.randint(0, 1031, (ROWS, TOKENS // 4))


MODELS: dict[str, Callable[[int], Made]] = {
    "GPT-2": _gpt2,
    "Llama": _llama,
    "T5": _t5,
    "ViT": _vit,
    "MLP": _mlp,
    "CNN": _conv_net,
    "LSTM": _lstm,
}

_CHECKPOINTED, _CHUNKED = ("checkpointing",), ("chunked loss",)
_SHARED = {"sequence_parallel_size": 2}

CASES = (
    Case("GPT-2", "fsdp2", 2),
    Case("GPT-2", "fsdp2", 2, 1, _CHECKPOINTED),
    Case("GPT-2", "ddp", 2),
    Case("GPT-2", "tp", 2, 1),
    Case("Llama", "fsdp2", 2, 0, _CHUNKED),
    Case("Llama", "fsdp2", 2, 1, precision="bf16-mixed"),
    Case("Llama", "fsdp2", 2, 1, precision="bf16-mixed", options={"gather_dtype": "bfloat16"}),
    Case("Llama", "ddp", 2, 1, ("8 bit",)),
    Case("T5", "fsdp2", 2),
    Case("T5", "ddp", 2, 1, _CHUNKED),
    Case("ViT", "fsdp2", 2, 1),
    Case("ViT", "ddp", 2, 0, _CHECKPOINTED),
    Case("GPT-2", "fsdp2", 2, 0, accumulate=2),
    Case("GPT-2", "fsdp2", 2, 1, options={"reshard_after_forward": False}),
    Case("GPT-2", "fsdp2", 3, 2),
    Case("GPT-2", "fsdp2", 3, 0, (*_CHECKPOINTED, *_CHUNKED)),
    Case("Llama", "fsdp2", 3, 1, _CHECKPOINTED),
    Case("Llama", "ddp", 3, 2),
    Case("T5", "fsdp2", 3, 2, _CHECKPOINTED),
    Case("ViT", "fsdp2", 3, 0, precision="bf16-true"),
    Case("GPT-2", "hybrid", 4, 3),
    Case("GPT-2", "tp", 4, 2),
    Case("GPT-2", "tp x hybrid", 4, 1),
    Case("Llama", "fsdp2", 4, 2),
    Case("Llama", "hybrid", 4, 0, _CHECKPOINTED),
    Case("T5", "hybrid", 4, 1),
    Case("ViT", "fsdp2", 4, 3, _CHECKPOINTED),
    Case("ViT", "ddp", 4, 0),
    Case("GPT-2", "ddp", 2, 1, accumulate=2),
    Case("GPT-2", "zero 1", 2, 1, width=512),
    Case("Llama", "zero 1", 3, 2, _CHECKPOINTED, width=512),
    Case("Llama", "zero 2", 2, 1, accumulate=2, width=512),
    Case("T5", "zero 2", 2, 1, width=512),
    Case("MLP", "zero 2", 2, 1, width=208),
    Case("MLP", "zero 2", 2, 1, accumulate=2, width=208),
    Case("GPT-2", "zero 3", 2, 0, width=512),
    Case("T5", "zero 3", 2, 0, _CHECKPOINTED, width=512),
    Case("ViT", "zero 3", 3, 1, width=384),
    Case("ViT", "zero 3", 2, 0, _CHECKPOINTED, width=384),
    Case("Llama", "zero 3", 4, 3, precision="bf16-mixed", width=512),
    Case("GPT-2", "zero 2 offload", 2, 1, width=512),
    Case("ViT", "zero 2 offload", 2, 1, accumulate=2, width=384),
    Case("Llama", "zero 3 offload optimizer", 2, 0, _CHECKPOINTED, width=512),
    Case("T5", "zero 3 offload", 3, 0, width=512),
    Case("GPT-2", "zero infinity optimizer", 2, 0, width=512),
    Case("Llama", "zero infinity optimizer", 2, 1, _CHECKPOINTED, accumulate=2, width=512),
    Case("GPT-2", "zero infinity", 2, 0, width=512),
    Case("T5", "zero infinity", 2, 1, _CHECKPOINTED, width=512),
    Case("Llama", "zero infinity", 3, 0, precision="bf16-mixed", width=512),
    Case("ViT", "zero infinity", 3, 1, accumulate=2, width=768),
    Case("Llama", "zero infinity", 2, 0, options={"params_in_host": 2_000_000}, width=512),
    Case("ViT", "zero infinity parameters", 2, 0, width=768),
    Case("MLP", "zero 1", 2, 1),
    Case("MLP", "zero 1", 2, 1, accumulate=2),
    Case("MLP", "zero 2", 2, 1),
    Case("MLP", "zero 2", 2, 1, accumulate=2),
    Case("MLP", "zero 1 offload", 2, 1, accumulate=3),
    Case("MLP", "zero 1", 2, 1, width=64),
    Case("MLP", "zero 2", 2, 1, accumulate=2, width=64),
    Case("MLP", "zero 2", 3, 2, width=64),
    Case("MLP", "zero 3", 2, 1, width=64),
    Case("MLP", "zero 1", 2, 1, accumulate=2, width=512),
    Case("MLP", "zero 2", 2, 1, width=512),
    Case("MLP", "zero 2", 2, 1, accumulate=2, width=512),
    Case("MLP", "zero 3", 2, 1),
    Case("MLP", "zero 3", 2, 1, accumulate=2),
    Case("MLP", "zero 3", 2, 0, width=512),
    Case("CNN", "zero 1", 2, 1, accumulate=2),
    Case("CNN", "zero 2", 2, 1),
    Case("CNN", "zero 2", 2, 0, accumulate=2),
    Case("CNN", "zero 3", 2, 1),
    Case("LSTM", "zero 1", 2, 1),
    Case("LSTM", "zero 1", 2, 1, accumulate=2),
    Case("LSTM", "zero 2", 2, 1, accumulate=2),
    Case("LSTM", "zero 3", 2, 1, accumulate=2),
    Case("Llama", "fsdp2", 2, 1, options=_SHARED, tokens=512),
    Case("Llama", "fsdp2", 2, 0, (*_CHECKPOINTED, *_CHUNKED), options=_SHARED, tokens=1024),
    Case("Llama", "ddp", 2, 0, options=_SHARED, tokens=512),
    Case("Llama", "zero 2", 2, 1, options=_SHARED, width=512, tokens=512),
    Case("Llama", "zero 3", 2, 0, options=_SHARED, width=512, tokens=512),
    Case("Llama", "zero 3", 2, 0, _CHECKPOINTED, options=_SHARED, width=512, tokens=512),
)
