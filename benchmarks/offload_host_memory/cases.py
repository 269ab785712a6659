"""What is measured: strategies, sizes of GPT-2 and numbers of ranks."""

from typing import Any

from lightning_memfit.strategies.zero import ZeroStrategy
from lightning_memfit.strategies.zero_infinity import ZeroInfinityStrategy

SEQUENCE_LENGTH = 64

SIZES = {
    "8M": {"n_embd": 256, "n_layer": 8, "n_head": 4, "vocab_size": 8192},
    "42M": {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 32768},
    "124M": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
    "326M": {"n_embd": 1600, "n_layer": 8, "n_head": 25, "vocab_size": 50257},
}

LARGEST = ("disk_both", "326M", 1, "bf16-mixed")

KINDS: dict[str, dict[str, Any]] = {
    "zero_2": {"stage": 2},
    "zero_3": {"stage": 3},
    "zero_2_offload": {"stage": 2, "offload_optimizer": True},
    "zero_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "disk_optimizer": {"offload_parameters": False},
    "disk_parameters": {"offload_optimizer": False},
    "disk_both": {},
}


def cases() -> list[tuple[str, str, int, str]]:
    """`(kind, size, ranks, precision)` of every run; the largest is GPT-2 XL with a sixth of its layers."""
    found = [(kind, size, ranks, "bf16-mixed") for ranks in (1, 2) for size in ("8M", "42M", "124M") for kind in KINDS]
    return [*found, ("zero_2", "42M", 1, "32-true"), ("disk_both", "42M", 1, "32-true"), LARGEST]


def config_of(size: str) -> dict[str, Any]:
    """The GPT-2 of a size."""
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return {"model_type": "gpt2", "n_positions": SEQUENCE_LENGTH, **tokens, **SIZES[size]}


def strategy_of(kind: str) -> ZeroStrategy:
    """A strategy, made from its arguments."""
    make = ZeroInfinityStrategy if kind.startswith("disk") else ZeroStrategy
    return make(**KINDS[kind])
