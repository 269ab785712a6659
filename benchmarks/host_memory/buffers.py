"""Every buffer that DeepSpeed keeps between steps, and which are page-locked.

DeepSpeed can lock host memory on the CPU too (`DS_PIN_MEMORY_BACKEND=native`), so that no GPU is needed to see which
buffers `pin_memory` concerns. The first rank looks. Needs 2 GiB of memory, the right to lock it (root, or
`ulimit -l unlimited`) and ten minutes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.host_memory.cases import Case, module_of, train
from benchmarks.runner import Benchmark, Options, Row, Stage
from benchmarks.training import answer_of, host_tensors
from lightning_memfit.strategies.zero import ZeroStrategy

RESULT = "deepspeed_buffers.json"
SIZE = "8M"

KINDS: dict[str, dict[str, Any]] = {
    "zero_1": {"stage": 1},
    "zero_2": {"stage": 2},
    "zero_3": {"stage": 3},
    "zero_2_offload": {"stage": 2, "offload_optimizer": True, "pin_memory": True},
    "zero_2_offload_pageable": {"stage": 2, "offload_optimizer": True},
    "zero_3_offload_optimizer": {"stage": 3, "offload_optimizer": True, "pin_memory": True},
    "zero_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "pin_memory": True},
    "zero_3_offload_pageable": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}

CASES = tuple(
    Case(kind, SIZE, ranks, precision, accumulate)
    for kind, ranks, precision, accumulate in (
        ("zero_2_offload", 1, "bf16-mixed", 1),
        ("zero_2_offload", 1, "bf16-mixed", 2),
        ("zero_2_offload", 2, "bf16-mixed", 2),
        ("zero_2_offload_pageable", 1, "bf16-mixed", 1),
        ("zero_3_offload_optimizer", 1, "bf16-mixed", 1),
        ("zero_3_offload", 1, "bf16-mixed", 2),
        ("zero_3_offload", 2, "bf16-mixed", 1),
        ("zero_3_offload_pageable", 1, "bf16-mixed", 1),
        ("zero_3", 1, "32-true", 1),
        ("zero_3", 2, "bf16-mixed", 2),
        ("zero_2", 1, "32-true", 1),
        ("zero_2", 2, "bf16-mixed", 2),
        ("zero_1", 2, "bf16-mixed", 2),
    )
)

ATTRIBUTES = (
    "bit16_groups_flat",
    "single_partition_of_fp32_groups",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "accumulated_grads_in_cpu",
    "averaged_gradients",
    "lp_param_buffer",
    "param_groups_fp16_flat_cpu_memory",
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    "ipg_buckets",
)
"""Of `DeepSpeedZeroOptimizer` and `DeepSpeedZeroOptimizer_Stage3`; a tensor's gradient is counted beside it."""


class Look(pl.Callback):
    """Look at the optimizer's buffers after every micro-batch; the last two are kept."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_after_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        """Gradients are reduced."""
        self.seen["after_backward"] = buffers(trainer.strategy.deepspeed_engine.optimizer)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Weights are updated."""
        self.seen["after_step"] = buffers(trainer.strategy.deepspeed_engine.optimizer)  # type: ignore[attr-defined]
        self.seen["locked_bytes"] = locked_bytes()


def buffers(optimizer: Any) -> dict[str, dict[str, int]]:
    """Bytes of storages by attribute, each storage once: `{attribute: {"bytes": ..., "locked": ...}}`."""
    from deepspeed.accelerator import get_accelerator

    found: dict[str, dict[str, int]] = {}
    counted: set[int] = set()

    def add(name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes() or storage.data_ptr() in counted:
            return
        counted.add(storage.data_ptr())
        entry = found.setdefault(name, {"bytes": 0, "locked": 0})
        entry["bytes"] += storage.nbytes()
        entry["locked"] += storage.nbytes() * bool(get_accelerator().is_pinned(tensor))

    for name in ATTRIBUTES:
        held = list(tensors(getattr(optimizer, name, None)))
        for tensor in held:
            add(name, tensor)
        for tensor in held:
            if tensor.is_leaf and tensor.grad is not None:
                add(f"{name}.grad", tensor.grad)
    for tensor in tensors(dict(optimizer.optimizer.state)):
        add("optimizer.state", tensor)
    for tensor in host_tensors():
        add("others", tensor)
    return found


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an attribute: one, some in containers, or a reduce bucket's buffers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif type(value).__name__ == "IPGBucket":
        yield from tensors(value.buffer)


def locked_bytes() -> int:
    """Memory that this process has locked (`VmLck` of `/proc/self/status`)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith("VmLck:")]
    return int(line.split()[1]) * 1024


def measure(case: Case, options: Options, row: Row) -> Row:
    """Two steps of a case."""
    worker, variables = "benchmarks.host_memory.buffers", {"DS_PIN_MEMORY_BACKEND": "native"}
    found: Row = answer_of(worker, case.name, seconds=options.seconds, **variables)
    return {"kind": case.kind, "ranks": case.ranks, "precision": case.precision, "accumulate": case.accumulate, **found}


def main(name: str, result: str) -> None:
    """Train as a rank; the first writes its buffers."""
    (case,), look = (case for case in CASES if case.name == name), Look()
    if train(ZeroStrategy(**KINDS[case.kind]), module_of(case), case, 2, look):
        Path(result).write_text(json.dumps(look.seen), encoding="utf-8")


BENCHMARK = Benchmark(
    RESULT,
    lambda options: CASES,
    (Stage(measure),),
    lambda rows, options: {"size": SIZE, "rows": rows},
)


if __name__ == "__main__":
    main(*sys.argv[1:])
