"""GPT-2 in several sizes under several strategies, and the run of a few steps on ranks of the CPU."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.training import QUIET
from lightning_memfit import CausalLM, RandomTokens
from lightning_memfit.strategies.zero import ZeroStrategy
from lightning_memfit.strategies.zero_infinity import ZeroInfinityStrategy

SEQUENCE_LENGTH = 64

SIZES = {
    "8M": {"n_embd": 256, "n_layer": 8, "n_head": 4, "vocab_size": 8192},
    "42M": {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 32768},
    "109M": {"n_embd": 1024, "n_layer": 8, "n_head": 16, "vocab_size": 8192},
    "124M": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
    "326M": {"n_embd": 1600, "n_layer": 8, "n_head": 25, "vocab_size": 50257},
}

KINDS: dict[str, dict[str, Any]] = {
    "zero_2": {"stage": 2},
    "zero_3": {"stage": 3},
    "zero_2_offload": {"stage": 2, "offload_optimizer": True},
    "zero_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "disk_optimizer": {"offload_parameters": False},
    "disk_parameters": {"offload_optimizer": False},
    "disk_both": {},
}


@dataclass(frozen=True)
class Case:
    """A run."""

    kind: str
    size: str
    ranks: int
    precision: str
    accumulate: int = 1

    @property
    def name(self) -> str:
        """What distinguishes it."""
        accumulated = f", {self.accumulate} accumulated" if self.accumulate > 1 else ""
        return f"{self.kind}, {self.size}, {self.ranks} ranks, {self.precision}{accumulated}"


LARGEST = Case("disk_both", "326M", 1, "bf16-mixed")


def cases() -> list[Case]:
    """Those whose peaks are measured; the largest is GPT-2 XL with a sixth of its layers."""
    sizes = ("8M", "42M", "124M")
    found = [Case(kind, size, ranks, "bf16-mixed") for ranks in (1, 2) for size in sizes for kind in KINDS]
    return [*found, Case("zero_2", "42M", 1, "32-true"), Case("disk_both", "42M", 1, "32-true"), LARGEST]


def config_of(size: str) -> dict[str, Any]:
    """The GPT-2 of a size."""
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return {"model_type": "gpt2", "n_positions": SEQUENCE_LENGTH, **tokens, **SIZES[size]}


def strategy_of(kind: str) -> ZeroStrategy:
    """A strategy, made from its arguments."""
    make = ZeroInfinityStrategy if kind.startswith("disk") else ZeroStrategy
    return make(**KINDS[kind])


def train(strategy: Any, module: CausalLM, case: Case, steps: int, callback: pl.Callback) -> bool:
    """Train on ranks of the CPU, and say whether this is the first."""
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=case.ranks,
        precision=case.precision,  # type: ignore[arg-type]
        max_steps=steps,
        accumulate_grad_batches=case.accumulate,
        callbacks=[callback],
        **QUIET,
    )
    vocabulary = SIZES[case.size]["vocab_size"]
    trainer.fit(module, RandomTokens(64, SEQUENCE_LENGTH, batch_size=1, vocab_size=vocabulary))
    return trainer.global_rank == 0


def module_of(case: Case) -> CausalLM:
    """The module of a case."""
    return CausalLM(config=config_of(case.size), learning_rate=1e-4)
