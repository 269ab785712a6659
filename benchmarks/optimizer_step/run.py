"""Time one optimizer step over the weights of a GPT-2, optimizer by optimizer.

    python -m benchmarks.optimizer_step.run --device cpu|cuda [--model gpt2|gpt2-xl] [--steps 20]

Beside torch's AdamW and bitsandbytes' own classes stand the optimizers that this package makes of them: 8-bit states as
`Optimizer8bit` converts them, and bfloat16 weights stepped in float32 (`StochasticRounding`). Weights have GPT-2's true
shapes and random gradients. Paged states exist on CUDA only. What is not installed or runs out of memory is recorded
as such. On the CPU one thread computes and times are of the processor, which other programs disturb little; those in
`techniques/core/step_cost.py` come from there.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from benchmarks.record import write
from lightning_memfit.memory import format_bytes
from lightning_memfit.optim.eight_bit import to_bitsandbytes
from lightning_memfit.optim.float32_step import Float32Step

RESULTS = Path(__file__).parents[1] / "results"
Make = Callable[[list[nn.Parameter]], Optimizer]


def _bitsandbytes(name: str) -> Make:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        import bitsandbytes

        optimizer: Optimizer = getattr(bitsandbytes.optim, name)(parameters, lr=1e-4)
        return optimizer

    return make


def _torchao(name: str) -> Make:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        from torchao import optim

        optimizer: Optimizer = getattr(optim, name)(parameters, lr=1e-4)
        return optimizer

    return make


def _rounded(make: Make) -> Make:
    return lambda parameters: Float32Step(make(parameters))


def _converted(**options: Any) -> Make:
    return lambda parameters: to_bitsandbytes(AdamW(parameters, lr=1e-4), **options)


FLOAT32: dict[str, Make] = {
    "torch AdamW, one weight at a time": lambda p: AdamW(p, lr=1e-4, foreach=False),
    "torch AdamW, foreach": lambda p: AdamW(p, lr=1e-4, foreach=True),
    "torch AdamW, fused": lambda p: AdamW(p, lr=1e-4, fused=True),
    "bitsandbytes AdamW8bit": _bitsandbytes("AdamW8bit"),
    "bitsandbytes PagedAdamW8bit": _bitsandbytes("PagedAdamW8bit"),
    "torch Adafactor": lambda p: Adafactor(p, lr=1e-4),
    "bitsandbytes Lion": _bitsandbytes("Lion"),
    "bitsandbytes Lion8bit": _bitsandbytes("Lion8bit"),
    "torchao AdamW4bit": _torchao("AdamW4bit"),
    "Optimizer8bit": _converted(),
    "Optimizer8bit, paged": _converted(paged=True),
}
BFLOAT16: dict[str, Make] = {
    "torch AdamW, fused": FLOAT32["torch AdamW, fused"],
    "bitsandbytes AdamW8bit": _bitsandbytes("AdamW8bit"),
    "Optimizer8bit": _converted(),
    "StochasticRounding, fused AdamW": _rounded(FLOAT32["torch AdamW, fused"]),
    "StochasticRounding, Optimizer8bit": _rounded(_converted()),
}


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Shapes of the weights of a GPT-2, without network and without memory."""
    import transformers

    sizes = {"gpt2": (768, 12, 12), "gpt2-xl": (1600, 48, 25)}
    width, layers, heads = sizes[model]
    with torch.device("meta"):
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads))
    return [tuple(p.shape) for p in net.parameters()]


def cases() -> Iterator[tuple[str, torch.dtype, Make]]:
    """Name, dtype of the weights, and how the optimizer is made."""
    for name, make in FLOAT32.items():
        yield name, torch.float32, make
    for name, make in BFLOAT16.items():
        yield name, torch.bfloat16, make


def measure(shapes: list[tuple[int, ...]], dtype: torch.dtype, make: Make, device: str, steps: int) -> dict[str, Any]:
    """Median and quantiles of the time of a step, bytes of state, and on CUDA bytes of scratch memory."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = make(parameters)
    for _ in range(2):
        optimizer.step()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    clock = time.perf_counter if cuda else time.process_time
    seconds = []
    for _ in range(steps):
        started = clock()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    elements = sum(p.numel() for p in parameters)
    row: dict[str, Any] = {
        "seconds": statistics.median(seconds),
        "seconds_fastest": min(seconds),
        "seconds_slowest": max(seconds),
        "state_bytes": sum(v.numel() * v.element_size() for v in states),
        "state_bytes_per_parameter": sum(v.numel() * v.element_size() for v in states) / elements,
    }
    if cuda:
        row["scratch_bytes"] = torch.cuda.max_memory_allocated() - before
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("gpt2", "gpt2-xl"), default=None, help="default: gpt2 on the CPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="optimizers whose name contains this")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    model = arguments.model or ("gpt2-xl" if arguments.device == "cuda" else "gpt2")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    shapes = shapes_of(model)
    rows = []
    for name, dtype, make in cases():
        if arguments.only not in name or (arguments.device == "cpu" and "aged" in name):
            continue  # there is nothing to page on the CPU
        row: dict[str, Any] = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
        try:
            row |= measure(shapes, dtype, make, arguments.device, arguments.steps)
            state = format_bytes(row["state_bytes"])
            print(f"{row['dtype']:9s} {name:42s} {1e3 * row['seconds']:9.2f} ms  {state} of state", flush=True)
        except (ImportError, torch.OutOfMemoryError, RuntimeError) as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(f"{row['dtype']:9s} {name:42s} {row['failed'][:90]}", flush=True)
        rows.append(row)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    command = f"python -m benchmarks.optimizer_step.run --device {arguments.device} --model {model}"
    num_parameters = sum(torch.Size(shape).numel() for shape in shapes)
    out = arguments.out or RESULTS / f"optimizer_step_{arguments.device}.json"
    write(out, {"command": command, "num_parameters": num_parameters, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
