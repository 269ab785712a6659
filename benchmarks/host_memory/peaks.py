"""Peaks of host memory under ZeRO on the CPU and from disk, predicted and measured.

The first rank's peak resident memory, beyond what it had when a preflight looks, is what a prediction is held against.
Needs 5 GiB of memory, 10 GB on the drive and half an hour.
"""

import gc
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.gpt2xl.from_disk import DRIVE
from benchmarks.host_memory.cases import KINDS, SEQUENCE_LENGTH, Case, cases, config_of, module_of, strategy_of, train
from benchmarks.runner import Benchmark, Options, Row, Stage
from benchmarks.training import answer_of, host_tensor_bytes
from lightning_memfit import CausalLM, RandomTokens
from lightning_memfit.estimate.deepspeed import DeepSpeedMemory, OffloadTarget, deepspeed_memory
from lightning_memfit.estimate.division import Division
from lightning_memfit.memory import Category
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.models.architecture import build, resolve_config
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.strategies import zero_infinity

RESULT = "offload_host_memory.json"
STEPS = 3


# --- a rank -----------------------------------------------------------------------------------------------------------


class Moments:
    """Peak and resident memory of this process, from one moment to the next (`/proc/self/status`, in bytes)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def mark(self, name: str) -> None:
        """End a moment, and let the kernel count its peak (`VmHWM`) anew."""
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        kib = {line[0]: int(line[1]) for line in lines if line[0] in ("VmHWM:", "VmRSS:", "VmLck:")}
        row = {
            "moment": name,
            "peak_bytes": kib["VmHWM:"] * 1024,
            "resident_bytes": kib["VmRSS:"] * 1024,
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
        if torch.empty(0).is_meta:  # a copy, to learn shapes
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


def main(name: str, drive: str, result: str) -> None:
    """Train as a rank; the first writes its moments."""
    import deepspeed  # noqa: F401  part of what is there before, under every strategy

    os.environ["MEMFIT_NVME_PATH"] = drive
    mark_after_shapes()
    (case,) = (case for case in cases() if case.name == name)
    module = Marked(config=config_of(case.size), learning_rate=1e-4)
    if train(strategy_of(case.kind), module, case, STEPS, Steps()):
        Path(result).write_text(json.dumps(MOMENTS.rows), encoding="utf-8")


# --- rows -------------------------------------------------------------------------------------------------------------


def measure(case: Case, options: Options, row: Row) -> Row:
    """Growth of resident memory since the start: its peak in each moment, and what stays after the last step."""
    drive, worker = options.drive.resolve(), "benchmarks.host_memory.peaks"
    start, *later = answer_of(worker, case.name, drive, seconds=options.seconds)
    before = start["resident_bytes"]
    moments = ("build", "setup", "passes", "update")
    peaks = {name: max(mark["peak_bytes"] for mark in later if mark["moment"] == name) - before for name in moments}
    return {
        "kind": case.kind,
        "size": case.size,
        "ranks": case.ranks,
        "precision": case.precision,
        "activation_bytes": activation_bytes(case),
        "before_bytes": before,
        "peak_bytes": max(peaks.values()),
        "peak_by_moment": peaks,
        "kept_bytes": later[-1]["resident_bytes"] - before,
        "tensor_bytes": later[-1]["tensor_bytes"],
        "locked_bytes": later[-1]["locked_bytes"],
    }


def activation_bytes(case: Case) -> int:
    """Peak of activations and temporary tensors in one micro-batch, from a trace of a step without any sharding."""
    data = RandomTokens(1, SEQUENCE_LENGTH, batch_size=1, vocab_size=config_of(case.size)["vocab_size"])
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    precision: Any = "bf16-true" if case.precision.startswith("bf16") else case.precision  # as DeepSpeed keeps weights
    given = {"emulation": Emulation(device="cpu"), "any_micro_batch": False}
    events = profile_module(module_of(case), batch, StepOptions(precision), **given).events
    starts = [at for at, _ in events.phases]
    index = max(index for index, (_, name) in enumerate(events.phases) if name == "forward")
    start, stop = starts[index], starts[index + 1]  # of the second step, which every later one repeats
    peak = events.breakdown_at(start + int(events.live_bytes()[start:stop].argmax()))
    return sum(peak.get(category) for category in (Category.ACTIVATION, Category.TEMPORARY))


def predict(row: Row) -> DeepSpeedMemory:
    """What the model of memory says of a measured row, which names its case and its activations."""
    kind, from_disk = row["kind"], row["kind"].startswith("disk")
    arguments, place = KINDS[kind], "nvme" if from_disk else "cpu"
    places: list[OffloadTarget] = [
        place if arguments.get(name, from_disk) else "none"  # type: ignore[misc]
        for name in ("offload_optimizer", "offload_parameters")
    ]
    division = Division(kind, arguments.get("stage", 3), row["ranks"], row["ranks"], True, *places)
    itemsize = 2 if row["precision"].startswith("bf16") else 4
    parameters, activations = parameters_of(row["size"]), row["activation_bytes"]
    return deepspeed_memory(division.run_of(parameters, itemsize, on_cpu=True, activation_bytes=activations))


@cache
def parameters_of(size: str) -> tuple[ParameterInfo, ...]:
    """Parameters of the GPT-2 of a size."""
    with torch.device("meta"):
        return parameter_table(build(resolve_config(None, None, config_of(size)), None, "sdpa"))


def error(row: Row) -> float:
    """Peak of host memory by the model as it is now, over the measured one, minus one."""
    return predict(row).host_peak_bytes / int(row["peak_bytes"]) - 1


def text(document: dict[str, Any]) -> str:
    """How far predictions are off, over all cases; the rows are in the file."""
    errors = [error(row) for row in document["rows"]]
    return (
        f"Over {len(errors)} runs of GPT-2 on the CPU with 1 and 2 ranks under ZeRO-2, -3 and all kinds of offloading, "
        f"the predicted peak of a rank's resident memory is {min(errors):+.1%} to {max(errors):+.1%} off "
        f"(`benchmarks/results/{RESULT}`, by `python -m benchmarks offload_host_memory`)."
    )


BENCHMARK = Benchmark(
    RESULT,
    lambda options: cases(),
    (Stage(measure),),
    say=lambda row: f"{error(row):+.1%}",
    arguments=(DRIVE,),
)


if __name__ == "__main__":
    main(*sys.argv[1:])
