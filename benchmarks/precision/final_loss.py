"""Final validation loss under each precision technique against float32 AdamW, on the quickstart's text.

    OMP_NUM_THREADS=1 python -m benchmarks.precision.final_loss

The model is of the quickstart's family, but small enough (128 instead of 448 wide, blocks of 128 tokens) that 42 runs
of 200 steps take about twenty minutes of one core. Every run of a seed starts from the same float32 weights and sees
the same batches; the loss is that of the final weights in a float32 forward pass, so that it tells what was learned and
not how it is evaluated. Writes `benchmarks/results/precision_final_loss.json`; `python -m benchmarks.pages`
puts it into the pages.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.record import trainer_of, write
from lightning_memfit.data import StandardLibraryText
from lightning_memfit.models import CausalLM
from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit

RESULT = Path(__file__).resolve().parents[1] / "results" / "precision_final_loss.json"
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


def train(technique: str, seed: int, learning_rate: float, steps: int) -> dict[str, float]:
    precision, callbacks = TECHNIQUES[technique]
    pl.seed_everything(seed, verbose=False)
    model = CausalLM(
        config=CONFIG, learning_rate=learning_rate, warmup_steps=5, optimizer_options={"betas": [0.9, 0.95]}
    )
    model.configure_model()  # in float32, whatever the precision of the run
    text = StandardLibraryText(sequence_length=128, batch_size=8, num_workers=0, seed=seed)
    trainer = trainer_of(*callbacks(), max_steps=steps, precision=precision, gradient_clip_val=1.0, limit_val_batches=0)
    started = time.perf_counter()
    trainer.fit(model, text)
    seconds = time.perf_counter() - started
    return {"loss": evaluate(model.float(), text), "milliseconds_per_step": round(1e3 * seconds / steps, 2)}


@torch.no_grad()
def evaluate(model: CausalLM, text: StandardLibraryText, num_batches: int = 40) -> float:
    model.eval()
    losses = [model(**batch).loss.item() for _, batch in zip(range(num_batches), text.val_dataloader(), strict=False)]
    return statistics.fmean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[1e-3, 1e-4])
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for learning_rate in arguments.learning_rates:
        losses: dict[str, list[float]] = {}
        for technique in TECHNIQUES:
            runs = [train(technique, seed, learning_rate, arguments.steps) for seed in range(arguments.seeds)]
            losses[technique] = [run["loss"] for run in runs]
            pairs = zip(losses[technique], losses[REFERENCE], strict=True)
            excess = [100 * (loss / reference - 1) for loss, reference in pairs]
            rows.append(
                {
                    "learning_rate": learning_rate,
                    "technique": technique,
                    "losses": [round(loss, 5) for loss in losses[technique]],
                    "percent_above_float32": [round(value, 3) for value in excess],
                    "mean_percent_above_float32": round(statistics.fmean(excess), 3),
                    "milliseconds_per_step": statistics.median(run["milliseconds_per_step"] for run in runs),
                }
            )
            print(f"{learning_rate:g}  {technique:46} {rows[-1]['mean_percent_above_float32']:+.3f} %", flush=True)
    figures = {
        "benchmark": "precision_final_loss",
        "command": "python -m benchmarks.precision.final_loss",
        "text": "StandardLibraryText, that of recipes/quickstart.yaml",
        "model": "of the quickstart's family, 128 instead of 448 wide, blocks of 128 instead of 256 tokens",
        "config": CONFIG,
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    write(arguments.output, figures)


if __name__ == "__main__":
    main()
