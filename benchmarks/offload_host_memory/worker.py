"""Host memory of a case: `python -m ....worker KIND SIZE RANKS PRECISION DRIVE FREED RESULT`.

Where FREED is `kept`, glibc keeps freed memory as it likes.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  part of what is there before, under every strategy
import lightning.pytorch as pl
import torch

from benchmarks.offload_host_memory.cases import SEQUENCE_LENGTH, config_of, strategy_of
from benchmarks.record import QUIET, host_tensor_bytes
from lightning_memfit import CausalLM, RandomTokens
from lightning_memfit.strategies import zero, zero_infinity

STEPS = 3


class Moments:
    """Peak and resident memory of this process, from one moment to the next (`/proc/self/status`, in bytes)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def mark(self, name: str) -> None:
        """End a moment, and let the kernel count its peak (`VmHWM`) anew."""
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        kib = {line[0]: int(line[1]) for line in lines if line[0] in ("VmHWM:", "VmRSS:", "RssFile:", "VmLck:")}
        row = {
            "moment": name,
            "peak_bytes": kib["VmHWM:"] * 1024,
            "resident_bytes": kib["VmRSS:"] * 1024,
            "file_bytes": kib["RssFile:"] * 1024,
            "locked_bytes": kib["VmLck:"] * 1024,
            "tensor_bytes": host_tensor_bytes(),
        }
        self.rows.append(row)
        Path("/proc/self/clear_refs").write_text("5")


MOMENTS = Moments()


class Marked(CausalLM):
    """Marks what is there when a preflight looks, before any weight is loaded, and what building takes."""

    def configure_model(self) -> None:
        """Build."""
        if torch._C._len_torch_dispatch_stack():  # a copy on fake tensors
            super().configure_model()
            return
        if self.model is None and not MOMENTS.rows:
            zero_infinity.parameters_once_built(self)
        super().configure_model()
        MOMENTS.mark("build")


class Steps(pl.Callback):
    """Mark every half of a step."""

    def on_train_start(self, *args: Any) -> None:
        """The engine stands."""
        MOMENTS.mark("setup")

    def on_after_backward(self, *args: Any) -> None:
        """Gradients are reduced."""
        MOMENTS.mark("passes")

    def on_train_batch_end(self, *args: Any) -> None:
        """Weights are updated."""
        MOMENTS.mark("update")


def mark_after_shapes() -> None:
    """Begin where the shapes are known and memory is looked at: that is what a prediction adds to."""
    plain = zero_infinity.parameters_once_built

    def parameters_once_built(module: Any) -> zero_infinity.Parameters:
        parameters = plain(module)
        gc.collect()
        MOMENTS.mark("start")
        return parameters

    zero_infinity.parameters_once_built = parameters_once_built


def main(kind: str, size: str, ranks: str, precision: str, drive: str, freed: str, result: str) -> None:
    if freed == "kept":
        zero.return_freed_memory = lambda: False
    os.environ["MEMFIT_NVME_PATH"] = drive
    torch.set_num_threads(1)
    mark_after_shapes()
    config = config_of(size)
    module = Marked(config=config, learning_rate=1e-4)
    trainer = pl.Trainer(
        strategy=strategy_of(kind),
        accelerator="cpu",
        devices=int(ranks),
        precision=precision,  # type: ignore[arg-type]
        max_steps=STEPS,
        callbacks=[Steps()],
        **QUIET,
    )
    vocabulary = config["vocab_size"]
    trainer.fit(module, RandomTokens(64, SEQUENCE_LENGTH, batch_size=1, vocab_size=vocabulary))
    if trainer.global_rank == 0:
        Path(result).write_text(json.dumps(MOMENTS.rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
