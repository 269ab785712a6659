"""BERT-large's published memory figures, predicted for today's software and for that of their time.

The published figures are NVML's after a run: the CUDA context and what torch's allocator had reserved. "Of its time" is
what torch 1.10, transformers 4.17 and their Trainer did, as far as memory depends on it, written out here:

- softmax's backward keeps its input beside its output
- attention is computed operator by operator
- `zero_grad` fills gradients with zeros instead of letting go of them, so that they are alive in forward, too
- transformers' own AdamW goes over parameters one by one, so that a step needs scratch memory for the largest only
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from benchmarks.runner import Benchmark, Named, Options, Stage, named
from benchmarks.text import ROOT
from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.memory import MIB
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.step import OptimizerFactory, StepOptions
from lightning_memfit.profile.trace import Emulation

EXPERIMENT = ROOT / "benchmarks" / "experiments" / "bert_large.yaml"
RESULT = "bert_large_published.json"
CONTEXT_BYTES = 1343 * MIB
"""The CUDA context, which the source measured by itself."""
V100 = Emulation(capability=(7, 0))
SEQUENCE, VOCABULARY = 512, 30_522


@dataclass(frozen=True)
class Row:
    """What a row of the experiment trains with."""

    optimizer: str = "adamw"
    micro_batch_size: int = 4
    checkpointing: bool = False
    precision: Any = "32-true"

    @property
    def accumulate_grad_batches(self) -> int:
        return 4 // self.micro_batch_size


_SMALL: dict[str, Any] = {"micro_batch_size": 1, "checkpointing": True}
ROWS = {
    "vanilla": Row(),
    "micro_batch": Row(micro_batch_size=1),
    "micro_batch_checkpointing": Row(**_SMALL),
    "fp16": Row(precision="16-mixed"),
    "micro_batch_checkpointing_fp16": Row(**_SMALL, precision="16-mixed"),
    "adafactor": Row("adafactor"),
    "micro_batch_checkpointing_fp16_adafactor": Row("adafactor", **_SMALL, precision="16-mixed"),
    "adam_8bit": Row("adam_8bit"),
    "micro_batch_checkpointing_fp16_adam_8bit": Row("adam_8bit", **_SMALL, precision="16-mixed"),
}
"""By the names of the experiment's rows."""


def bert_large(attention: str, checkpointing: bool) -> nn.Module:
    """The model on the meta device, as its trace needs no weights."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, attn_implementation=attention, **shape))
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


# --- the software of its time -----------------------------------------------------------------------------------------


class _LoopedAdamW(torch.optim.Optimizer):
    """AdamW that allocates what a loop over parameters does: both moments, and one denominator at a time."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            decay, squared_decay = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - decay)
                state["square"].mul_(squared_decay).addcmul_(parameter.grad, parameter.grad, value=1 - squared_decay)
                denominator = state["square"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["mean"], denominator, value=-group["lr"])


def _filled_with_zeros(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let `zero_grad` keep gradients, as was the default before torch 2.0."""
    plain = optimizer.zero_grad
    optimizer.zero_grad = lambda set_to_none=False: plain(set_to_none=False)  # type: ignore[method-assign]
    return optimizer


class _SoftmaxKeepingInput(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, scores: Tensor, dim: int) -> Tensor:
        result = torch.softmax(scores, dim)
        context.save_for_backward(scores, result)
        context.dim = dim
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        scores, result = context.saved_tensors
        return torch._softmax_backward_data(gradient, result, context.dim, scores.dtype), None


@contextmanager
def _softmax_of_its_time() -> Iterator[None]:
    """In fp32, as autocast on CUDA computes it."""
    plain = F.softmax

    def softmax(scores: Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return _SoftmaxKeepingInput.apply(scores.float(), dim)

    F.softmax = softmax
    try:
        yield
    finally:
        F.softmax = plain


def _optimizer(name: str, of_its_time: bool) -> OptimizerFactory:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer
        if name == "adamw":
            optimizer = (_LoopedAdamW if of_its_time else torch.optim.AdamW)(model.parameters())
        elif name == "adafactor":
            from transformers.optimization import Adafactor

            optimizer = Adafactor(model.parameters(), lr=1e-5, scale_parameter=False, relative_step=False)
        else:
            import bitsandbytes

            optimizer = bitsandbytes.optim.Adam8bit(model.parameters())
        return _filled_with_zeros(optimizer) if of_its_time else optimizer

    return make


# --- predictions ------------------------------------------------------------------------------------------------------


def predicted(row: Row, attention: str = "sdpa", of_its_time: bool = False) -> dict[str, Any]:
    """Bytes that a V100 would show for a row, and where the peak is.

    Args:
        row: What trains.
        attention: As transformers' `attn_implementation` takes it.
        of_its_time: With the optimizers, `zero_grad` and softmax of the figures' time.
    """
    batch = {
        "input_ids": torch.randint(VOCABULARY, (row.micro_batch_size, SEQUENCE)),
        "labels": torch.randint(2, (row.micro_batch_size,)),
    }
    options = StepOptions(row.precision, row.accumulate_grad_batches, gradient_clip_val=1.0)
    factory = _optimizer(row.optimizer, of_its_time)
    model = bert_large(attention, row.checkpointing)

    def estimate() -> dict[str, Any]:
        found = estimate_step(
            profile_module(model, batch, options, V100, make_optimizer=factory, any_micro_batch=False)
        )
        return {"total_bytes": found.reserved_bytes + CONTEXT_BYTES, "phase": found.phase}

    if not of_its_time:
        return estimate()
    with _softmax_of_its_time():
        return estimate()


def summary(document: dict[str, Any]) -> str:
    """The section of `docs/accuracy.md`."""

    def span(name: str) -> str:
        errors = [row[name]["total_bytes"] / MIB / row["published_mib"] - 1 for row in document["rows"]]
        return f"{100 * min(errors):+.1f} % to {100 * max(errors):+.1f} %"

    return _PUBLISHED.format(
        rows=len(document["rows"]),
        file=RESULT,
        today=span("today"),
        old=span("of_its_time"),
    )


_PUBLISHED = """
## Published figures of older software
Predictions for today's software are {today} off the {rows} figures that the guide named in
[BERT-large](benchmarks/bert_large.md) published for a V100. With the rules of its own software they are {old} off
(`benchmarks/results/{file}`, by `python -m benchmarks bert_large_published`). Since then fused attention keeps no
scores
(36 MiB per layer and sample in fp32), softmax does not keep its input (16 MiB), AdamW updates all parameters at once,
with scratch memory as large as the weights, and gradients are freed, not filled with zeros. 460 MiB of the row with
fp16 and four samples are not explained.
"""


def _row(case: Named, options: Options, known: dict[str, Any]) -> dict[str, Any]:
    entry, row = yaml.safe_load(EXPERIMENT.read_text())["rows"][case.name], ROWS[case.name]
    return {
        "title": entry["title"],
        "published_mib": entry["reference"]["memory_mb"],
        "today": predicted(row),
        "of_its_time": predicted(row, "eager", of_its_time=True),
    }


def _say(row: dict[str, Any]) -> str:
    totals = ", ".join(f"{key} {row[key]['total_bytes'] / MIB:,.0f}" for key in ("today", "of_its_time"))
    return f"published {row['published_mib']:,}, {totals} MiB"


BENCHMARK = Benchmark(
    RESULT,
    lambda options: named(ROWS),
    (Stage(_row, timed=False),),
    lambda rows, options: {"context_bytes": CONTEXT_BYTES, "rows": rows},
    _say,
)
