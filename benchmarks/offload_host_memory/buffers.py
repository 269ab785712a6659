"""Every buffer that DeepSpeed keeps between steps, and which are page-locked: `python -m ....buffers`, without options.

DeepSpeed can lock host memory on the CPU too (`DS_PIN_MEMORY_BACKEND=native`), so that no GPU is needed to see which
buffers `pin_memory` concerns. Every case runs in processes of its own; the first rank looks. Needs 2 GiB of memory,
the right to lock it (root, or `ulimit -l unlimited`) and ten minutes; writes
`benchmarks/results/deepspeed_buffers.json`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import QUIET, ROOT, answer_of, host_tensors, write

RESULTS = ROOT / "benchmarks" / "results" / "deepspeed_buffers.json"
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

CASES: tuple[tuple[str, int, str, int], ...] = (
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
"""`(kind, ranks, precision, accumulate_grad_batches)`."""

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


def main() -> None:
    rows = []
    for case in CASES:
        rows.append(answer_of("benchmarks.offload_host_memory.buffers", *case, DS_PIN_MEMORY_BACKEND="native"))
        print(json.dumps(rows[-1]), flush=True)
    write(RESULTS, {"size": SIZE, "rows": rows})


def train(kind: str, ranks: str, precision: str, accumulate: str, result: str) -> None:
    """Two steps of a case; the first rank writes its buffers."""
    import lightning.pytorch as pl
    import torch

    from benchmarks.offload_host_memory.cases import SEQUENCE_LENGTH, config_of
    from lightning_memfit import CausalLM, RandomTokens
    from lightning_memfit.strategies.zero import ZeroStrategy

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

    torch.set_num_threads(1)
    config = config_of(SIZE)
    look = Look()
    trainer = pl.Trainer(
        strategy=ZeroStrategy(**KINDS[kind]),
        accelerator="cpu",
        devices=int(ranks),
        precision=precision,  # type: ignore[arg-type]
        max_steps=2,
        accumulate_grad_batches=int(accumulate),
        callbacks=[look],
        **QUIET,
    )
    module = CausalLM(config=config, learning_rate=1e-4)
    trainer.fit(module, RandomTokens(64, SEQUENCE_LENGTH, batch_size=1, vocab_size=config["vocab_size"]))
    if trainer.global_rank == 0:
        case = {"kind": kind, "ranks": int(ranks), "precision": precision, "accumulate": int(accumulate)}
        Path(result).write_text(json.dumps(case | look.seen), encoding="utf-8")


def buffers(optimizer: Any) -> dict[str, dict[str, int]]:
    """Bytes of storages by attribute, each storage once: `{attribute: {"bytes": ..., "locked": ...}}`."""
    from deepspeed.accelerator import get_accelerator

    found: dict[str, dict[str, int]] = {}
    counted: set[int] = set()

    def add(name: str, tensor: Any) -> None:
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


def tensors(value: Any) -> Iterator[Any]:
    """Tensors in an attribute: one, some in containers, or a reduce bucket's buffers."""
    import torch

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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*sys.argv[1:])
    else:
        main()
