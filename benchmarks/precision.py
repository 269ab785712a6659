"""Final validation loss under each precision technique against float32 AdamW, on the quickstart's text.

The model is of the quickstart's family, but small enough (128 instead of 448 wide, blocks of 128 tokens) that 42 runs
of 200 steps take about twenty minutes of one core. Every run of a seed starts from the same float32 weights and sees
the same batches; the loss is that of the final weights in a float32 forward pass, so that it tells what was learned and
not how it is evaluated.
"""

import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.runner import Benchmark, Named, Options, Row, Stage
from benchmarks.text import table
from benchmarks.training import trainer_of
from lightning_memfit.data import StandardLibraryText
from lightning_memfit.models import CausalLM
from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit

RESULT = "precision_final_loss.json"
REFERENCE = "float32"
TECHNIQUES: dict[str, tuple[str, Callable[[], list[pl.Callback]]]] = {
    REFERENCE: ("32-true", list),
    "8-bit states": ("32-true", lambda: [Optimizer8bit()]),
    "bf16-true": ("bf16-true", list),
    "bf16-true, stochastic rounding": ("bf16-true", lambda: [StochasticRounding()]),
    "bf16-true, 8-bit states, stochastic rounding": ("bf16-true", lambda: [Optimizer8bit(), StochasticRounding()]),
    "bf16-true, host master weights": ("bf16-true", lambda: [HostMasterWeights()]),
}
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 258,
    "n_positions": 128,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


def cases(options: Options) -> list[Named]:
    """Every technique at both learning rates."""
    both = product((1e-3, 1e-4), TECHNIQUES)
    return [Named(f"{technique}, {rate:g}", (technique, rate)) for rate, technique in both]


def train(case: Named, options: Options, row: Row) -> Row:
    """Losses of all seeds."""
    technique, rate = case.of
    precision, callbacks = TECHNIQUES[technique]
    losses, milliseconds = [], []
    for seed in range(options.seeds):
        pl.seed_everything(seed, verbose=False)
        adam = {"betas": [0.9, 0.95]}
        model = CausalLM(config=CONFIG, learning_rate=rate, warmup_steps=5, optimizer_options=adam)
        model.configure_model()  # in float32, whatever the precision of the run
        text = StandardLibraryText(sequence_length=128, batch_size=8, num_workers=0, seed=seed)
        others = {"precision": precision, "gradient_clip_val": 1.0, "limit_val_batches": 0}
        trainer = trainer_of(*callbacks(), max_steps=options.steps, **others)
        started = time.perf_counter()
        trainer.fit(model, text)
        milliseconds.append(1e3 * (time.perf_counter() - started) / options.steps)
        losses.append(round(evaluate(model.float(), text), 5))
    step = round(statistics.median(milliseconds), 2)
    return {"technique": technique, "learning_rate": rate, "losses": losses} | {"milliseconds_per_step": step}


@torch.no_grad()
def evaluate(model: CausalLM, text: StandardLibraryText, num_batches: int = 40) -> float:
    """Mean loss of validation."""
    model.eval()
    losses = [model(**batch).loss.item() for _, batch in zip(range(num_batches), text.val_dataloader(), strict=False)]
    return statistics.fmean(losses)


def figures(rows: list[Row], options: Options) -> Row:
    """The rows, with how far they are above the reference at their rate."""
    plain = {row["learning_rate"]: row["losses"] for row in rows if row.get("technique") == REFERENCE}
    for row in rows:
        if row.get("learning_rate") in plain:
            pairs = zip(row["losses"], plain[row["learning_rate"]], strict=True)
            excess = [round(100 * (loss / reference - 1), 3) for loss, reference in pairs]
            row["percent_above_float32"] = excess
            row["mean_percent_above_float32"] = round(statistics.fmean(excess), 3)
    return {"config": CONFIG, "seeds": options.seeds, "steps": options.steps, "rows": rows}


def text(document: dict[str, Any]) -> str:
    """The table, with what it says above it."""
    rows, config = document["rows"], document["config"]
    rates = list(dict.fromkeys(row["learning_rate"] for row in rows))
    mean = {(row["technique"], row["learning_rate"]): row["mean_percent_above_float32"] for row in rows}
    lines = [
        [technique, *(f"{mean[technique, rate]:+.3f} %" for rate in rates)]
        for technique in dict.fromkeys(row["technique"] for row in rows)
        if technique != REFERENCE
    ]
    return (
        f"Validation loss after {document['steps']} steps of a GPT-2 with {config['n_layer']} blocks of width "
        f"{config['n_embd']} on the quickstart's\ntext, mean of {document['seeds']} seeds, against float32 AdamW from "
        f"the same weights\n(`benchmarks/results/{RESULT}`, by `python -m benchmarks precision`):\n\n"
    ) + table(["", *(f"learning rate {rate:g}" for rate in rates)], lines)


BENCHMARK = Benchmark(
    RESULT,
    cases,
    (Stage(train),),
    figures,
    arguments=(("--seeds", {"type": int, "default": 3}), ("--steps", {"type": int, "default": 200})),
)
