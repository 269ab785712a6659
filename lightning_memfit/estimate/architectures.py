"""Sizes of well-known architectures, from their papers and model cards: data for `memfit estimate --model NAME`."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from lightning_memfit.memory.kind import CUDA, DeviceType
from lightning_memfit.optim.optimizers import OPTIMIZERS

Kind = Literal["causal", "encoder-decoder", "text classification", "masked", "image classification"]
"""What a model is trained on, which decides the batch."""


_LARGEST_COUNT = (1 << 31) - 1

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def traceable_optimizers() -> tuple[str, ...]:
    """Names of the optimizers that a named run may have."""
    return tuple(record.name for record in OPTIMIZERS.values() if record.can_be_traced)


@dataclass(frozen=True)
class NamedRun:
    """A training run of a model that is known by name."""

    model: str
    """Name in `ARCHITECTURES`, a folder with a `config.json`, or such a file."""
    micro_batch_size: int = 1
    sequence_length: int | None = None
    """Tokens per sample; the architecture's usual length by default."""
    precision: str = "32-true"
    optimizer: str = "adamw"
    checkpointing: Literal["none", "full"] = "none"
    attention: Literal["sdpa", "eager"] | None = None
    """What transformers chooses by default: `sdpa` for every model that has it."""
    accumulate_grad_batches: int = 1
    device: DeviceType = CUDA
    capability: tuple[int, int] = (8, 0)
    techniques: tuple[str, ...] = ()
    """Names and options of the techniques whose callbacks are traced, as the user wrote them."""

    def __post_init__(self) -> None:
        for name, value in (
            ("micro_batch_size", self.micro_batch_size),
            ("sequence_length", 1 if self.sequence_length is None else self.sequence_length),
            ("accumulate_grad_batches", self.accumulate_grad_batches),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_COUNT:
                raise ValueError(f"`{name}={value!r}` must be a whole number from 1 to {_LARGEST_COUNT:,}.")
        for name, choice, choices in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, traceable_optimizers()),
            ("checkpointing", self.checkpointing, ("none", "full")),
            ("attention", self.attention or "sdpa", ("sdpa", "eager")),
        ):
            if choice not in choices:
                raise ValueError(f"`{name}={choice!r}` is unknown. Choose from: {', '.join(choices)}.")


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face model without weights."""

    name: str
    model_class: str
    """Class in `transformers`."""
    config_class: str
    config: Mapping[str, Any]
    """Entries that differ from the configuration's defaults."""
    kind: Kind
    num_parameters: int
    """Parameters of this class according to the source, tied ones once."""
    sequence_length: int | None
    """Default length: the one the model was trained with, 2048 at most. None for images."""
    max_sequence_length: int | None
    source: str


def _gpt2(name: str, layers: int, width: int, heads: int, parameters: int) -> Architecture:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads}
    source = "Radford et al. 2019, openai-community model cards"
    return Architecture(name, "GPT2LMHeadModel", "GPT2Config", sizes, "causal", parameters, 1024, 1024, source)


def _bert(name: str, layers: int, width: int, heads: int, parameters: int) -> Architecture:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    source = "Devlin et al. 2019, google-bert model cards (uncased), with a classification head"
    model = "BertForSequenceClassification"
    return Architecture(name, model, "BertConfig", sizes, "text classification", parameters, 512, 512, source)


def _llama(
    name: str,
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    key_value_heads: int,
    parameters: int,
    vocabulary: int = 128256,
    tied: bool = False,
    positions: int = 131072,
    family: str = "Llama",
    source: str = "meta-llama model cards",
) -> Architecture:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
    }
    classes = f"{family}ForCausalLM", f"{family}Config"
    return Architecture(name, *classes, sizes, "causal", parameters, 2048, positions, source)


def _t5(name: str, layers: int, width: int, feed_forward: int, heads: int, parameters: int) -> Architecture:
    sizes = {
        "num_layers": layers,
        "d_model": width,
        "d_ff": feed_forward,
        "num_heads": heads,
        "decoder_start_token_id": 0,
    }
    if name == "t5-3b":
        sizes["d_kv"] = 128
    source = "Raffel et al. 2020, google-t5 model cards"
    model = "T5ForConditionalGeneration"
    return Architecture(name, model, "T5Config", sizes, "encoder-decoder", parameters, 512, None, source)


def _vit(name: str, layers: int, width: int, heads: int, patch: int, parameters: int) -> Architecture:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "patch_size": patch,
        "num_labels": 1000,
    }
    source = "Dosovitskiy et al. 2021, 224 pixels, 1000 classes"
    model = "ViTForImageClassification"
    return Architecture(name, model, "ViTConfig", sizes, "image classification", parameters, None, None, source)


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        _gpt2("gpt2", 12, 768, 12, 124_439_808),
        _gpt2("gpt2-medium", 24, 1024, 16, 354_823_168),
        _gpt2("gpt2-large", 36, 1280, 20, 774_030_080),
        _gpt2("gpt2-xl", 48, 1600, 25, 1_557_611_200),
        _bert("bert-base", 12, 768, 12, 109_483_778),
        _bert("bert-large", 24, 1024, 16, 335_143_938),
        _llama("llama-3.2-1b", 16, 2048, 8192, 32, 8, 1_235_814_400, tied=True),
        _llama("llama-3.2-3b", 28, 3072, 8192, 24, 8, 3_212_749_824, tied=True),
        _llama("llama-3.1-8b", 32, 4096, 14336, 32, 8, 8_030_261_248),
        _llama("llama-2-7b", 32, 4096, 11008, 32, 32, 6_738_415_616, vocabulary=32000, positions=4096),
        _llama("mistral-7b", 32, 4096, 14336, 32, 8, 7_241_732_096, 32000, positions=32768, family="Mistral",
               source="Jiang et al. 2023, mistralai model card v0.1"),
        _llama("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 494_032_768, 151936, True, 32768, "Qwen2", "Qwen model cards"),
        _llama("qwen2.5-7b", 28, 3584, 18944, 28, 4, 7_615_616_512, 152064, positions=131072, family="Qwen2",
               source="Qwen model cards"),
        _t5("t5-small", 6, 512, 2048, 8, 60_506_624),
        _t5("t5-base", 12, 768, 3072, 12, 222_903_552),
        _t5("t5-large", 24, 1024, 4096, 16, 737_668_096),
        _t5("t5-3b", 24, 1024, 16384, 32, 2_851_598_336),
        _vit("vit-base", 12, 768, 12, 16, 86_567_656),
        _vit("vit-large", 24, 1024, 16, 16, 304_326_632),
        _vit("vit-huge", 32, 1280, 16, 14, 632_045_800),
    )
}  # fmt: skip


def find_architecture(name: str) -> Architecture:
    """Look an architecture up; an owner before a slash and upper case don't matter.

    Raises:
        ValueError: If there is none of that name; lists the closest.
    """
    key = name.rpartition("/")[2].lower()
    if key in ARCHITECTURES:
        return ARCHITECTURES[key]
    closest = get_close_matches(key, ARCHITECTURES, n=5, cutoff=0.4) or list(ARCHITECTURES)
    raise ValueError(
        f"`--model {name}` is neither a known architecture nor a local folder or file with a Hugging Face config. "
        f"Closest: {', '.join(closest)}. For your own LightningModule give `--config RECIPE`."
    )
