"""The runs that estimates are compared with: small real models on the CPU, large ones on a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from benchmarks.training import OwnLoss


@dataclass(frozen=True)
class Case:
    """One training run of two optimizer steps."""

    model: str
    micro_batch_size: int
    sequence_length: int = 0
    precision: str = "32-true"
    optimizer: str = "adamw"
    checkpointing: bool = False
    accumulate_grad_batches: int = 1
    attention: str = "sdpa"
    kernel: str = ""
    """Attention kernel to force on CUDA; empty for torch's own choice."""

    @property
    def name(self) -> str:
        """One line that tells cases apart."""
        parts = [self.model, f"b{self.micro_batch_size}"]
        parts += [f"s{self.sequence_length}"] if self.sequence_length else []
        parts += [self.precision, self.optimizer]
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [f"accumulate {self.accumulate_grad_batches}"] if self.accumulate_grad_batches > 1 else []
        parts += [self.kernel or self.attention] if self.kernel or self.attention != "sdpa" else []
        return " ".join(parts)


def _optimizer(parameters: Any, name: str) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum; the 8-bit form is made by the callback."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=name == "adamw_fused" or None)


class Perceptron(pl.LightningModule):
    """A plain LightningModule without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.BatchNorm1d(1024), nn.Dropout(0.1), nn.Linear(1024, 512), nn.GELU()
        )
        self.head = nn.Linear(512, 10)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.head(self.layers(batch["x"])), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _language(kind: str, **sizes: Any) -> Callable[[str], nn.Module]:
    def build(attention: str) -> nn.Module:
        import transformers

        config_class, model_class = {
            "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
            "llama": ("LlamaConfig", "LlamaForCausalLM"),
            "bert": ("BertConfig", "BertForSequenceClassification"),
            "t5": ("T5Config", "T5ForConditionalGeneration"),
            "vit": ("ViTConfig", "ViTForImageClassification"),
            "resnet": ("ResNetConfig", "ResNetForImageClassification"),
        }[kind]
        config = getattr(transformers, config_class)(**sizes)
        config._attn_implementation = "eager" if kind == "resnet" else attention
        config.use_cache = False
        return getattr(transformers, model_class)(config).train()

    return build


_MODELS: dict[str, Callable[[str], nn.Module]] = {
    "gpt2-2x128": _language("gpt2", n_layer=2, n_embd=128, n_head=4, vocab_size=1000, n_positions=256),
    "gpt2-6x192": _language("gpt2", n_layer=6, n_embd=192, n_head=6, vocab_size=2000, n_positions=256),
    "gpt2-12x256": _language("gpt2", n_layer=12, n_embd=256, n_head=8, vocab_size=4000, n_positions=256),
    "llama-8x256": _language(
        "llama",
        num_hidden_layers=8,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=688,
        vocab_size=4000,
    ),
    "bert-8x256": _language(
        "bert",
        num_hidden_layers=8,
        hidden_size=256,
        num_attention_heads=8,
        intermediate_size=1024,
        vocab_size=4000,
    ),
    "t5-4x256": _language(
        "t5", num_layers=4, d_model=256, d_kv=32, num_heads=8, d_ff=1024, vocab_size=4000, decoder_start_token_id=0
    ),
    "vit-8x192": _language(
        "vit",
        num_hidden_layers=8,
        hidden_size=192,
        num_attention_heads=6,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
    ),
    "resnet": _language(
        "resnet", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], embedding_size=64, layer_type="basic"
    ),
    "gpt2": _language("gpt2"),
    "gpt2-medium": _language("gpt2", n_layer=24, n_embd=1024, n_head=16),
    "gpt2-large": _language("gpt2", n_layer=36, n_embd=1280, n_head=20),
    "gpt2-xl": _language("gpt2", n_layer=48, n_embd=1600, n_head=25),
    "bert-large": _language(
        "bert", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "vit-huge": _language(
        "vit",
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
        image_size=224,
        patch_size=14,
    ),
}


def build_module(case: Case, device: str = "cpu") -> pl.LightningModule:
    """The LightningModule of a case, its weights on `device` (`meta` for estimating)."""
    with torch.device(device):
        if case.model == "mlp":
            return Perceptron()
        return OwnLoss(_MODELS[case.model](case.attention), partial(_optimizer, name=case.optimizer))


def build_batch(case: Case) -> dict[str, torch.Tensor]:
    """A batch of random ids, pixels or features."""
    generator = torch.Generator().manual_seed(0)
    size, length = case.micro_batch_size, case.sequence_length
    if case.model == "mlp":
        return {"x": torch.randn(size, 256, generator=generator), "y": torch.randint(10, (size,), generator=generator)}
    if case.model.startswith(("vit", "resnet")):
        side = {"vit-8x192": 64, "resnet": 64, "vit-huge": 224}[case.model]
        pixels = torch.randn(size, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(2, (size,), generator=generator)}
    ids = torch.randint(1, 1000, (size, length), generator=generator)
    if case.model.startswith("bert"):
        labels = torch.randint(2, (size,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {"input_ids": ids, "labels": ids}


class Batches:
    """One batch, repeated; every iteration gives fresh tensors, as a loader does."""

    def __init__(self, batch: dict[str, torch.Tensor], count: int) -> None:
        self.batch = batch
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        for _ in range(self.count):
            yield {name: tensor.clone() for name, tensor in self.batch.items()}


def build_callbacks(case: Case) -> tuple[Any, ...]:
    """The techniques of a case as callbacks."""
    callbacks: list[Any] = []
    if case.checkpointing:
        from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing

        callbacks.append(ActivationCheckpointing())
    if case.optimizer == "adamw_8bit":
        from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit

        callbacks.append(Optimizer8bit())
    return tuple(callbacks)


def cpu_cases() -> Iterator[Case]:
    """At least thirty runs that differ in model, technique, precision and size."""
    models = {
        "gpt2-2x128": 128,
        "gpt2-6x192": 128,
        "gpt2-12x256": 128,
        "llama-8x256": 128,
        "bert-8x256": 128,
        "t5-4x256": 96,
        "vit-8x192": 0,
        "resnet": 0,
        "mlp": 0,
    }
    for model, length in models.items():
        size = 64 if model == "mlp" else 4
        yield Case(model, size, length)
        yield Case(model, 2 * size, length, "bf16-mixed")
        yield Case(model, 2 * size, length, optimizer="adamw_8bit")
        yield Case(model, size, length, accumulate_grad_batches=4)
        if model not in ("mlp", "resnet"):
            yield Case(model, 2 * size, length, checkpointing=True)
            yield Case(model, size, length, "bf16-true", optimizer="adamw_8bit", checkpointing=True)
    yield Case("gpt2-6x192", 8, 256, attention="eager")
    yield Case("gpt2-12x256", 2, 128, "bf16-mixed", checkpointing=True, accumulate_grad_batches=4)


def cuda_cases() -> Iterator[Case]:
    """At least forty runs on one large card; those that answer most come first."""
    for precision in ("32-true", "16-mixed"):  # the rows of the table of BERT-large
        yield Case("bert-large", 4, 512, precision)
        yield Case("bert-large", 1, 512, precision, accumulate_grad_batches=4)
        yield Case("bert-large", 1, 512, precision, accumulate_grad_batches=4, checkpointing=True)
    yield Case("bert-large", 4, 512, optimizer="adamw_8bit")
    yield Case("bert-large", 1, 512, "16-mixed", "adamw_8bit", accumulate_grad_batches=4, checkpointing=True)
    yield Case("gpt2-xl", 1, 1024, "bf16-true", checkpointing=True, optimizer="adamw_8bit")
    for kernel in ("", "flash", "efficient", "math", "cudnn"):
        yield Case("gpt2", 8, 1024, "bf16-mixed", kernel=kernel)
        yield Case("gpt2", 8, 1024, "bf16-true", optimizer="adamw_fused", kernel=kernel)
    yield Case("gpt2", 8, 1024, "bf16-mixed", attention="eager")
    yield Case("gpt2", 8, 1024, "32-true", attention="eager")
    for model, size in {"gpt2": 16, "gpt2-medium": 8, "gpt2-large": 4, "gpt2-xl": 4}.items():
        yield Case(model, size, 1024, "32-true")
        yield Case(model, size, 1024, "bf16-mixed")
        yield Case(model, size, 1024, "bf16-mixed", checkpointing=True)
        yield Case(model, size, 1024, "bf16-true", checkpointing=True, optimizer="adamw_8bit")
        yield Case(model, size, 1024, "bf16-true", optimizer="adamw_fused")
    yield Case("gpt2-medium", 4, 512, "16-mixed", accumulate_grad_batches=4)
    yield Case("gpt2-medium", 3, 1000, "bf16-mixed", optimizer="sgd")
    for model, size, length in (("bert-large", 16, 512), ("vit-huge", 16, 0)):
        yield Case(model, size, length, "32-true")
        yield Case(model, 2 * size, length, "16-mixed")
        yield Case(model, size, length, "bf16-mixed", checkpointing=True)
        yield Case(model, size, length, "bf16-mixed", accumulate_grad_batches=4)
        yield Case(model, size // 2, length, "bf16-true", optimizer="adamw_8bit")
