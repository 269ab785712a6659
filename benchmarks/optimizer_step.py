"""Time of one optimizer step over the weights of a GPT-2, on CUDA of GPT-2 XL, optimizer by optimizer.

Beside torch's AdamW and bitsandbytes' own classes stand the optimizers that this package makes of them: 8-bit states as
`Optimizer8bit` converts them, and bfloat16 weights stepped in float32 (`StochasticRounding`). Weights have GPT-2's true
shapes and random gradients. Paged states exist on CUDA only. On the CPU one thread computes and times are of the
processor, which other programs disturb little; those in `techniques/core/step_cost.py` come from there.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from benchmarks.runner import DEVICE, SMALL, Benchmark, Named, Options, Row, Stage
from lightning_memfit.memory import format_bytes
from lightning_memfit.optim.eight_bit import to_bitsandbytes
from lightning_memfit.optim.float32_step import Float32Step

Make = Callable[[list[nn.Parameter]], Optimizer]


def _of(path: str) -> Make:
    """An optimizer by the path of its class, which is imported when it is made."""
    module, _, name = path.rpartition(".")
    return lambda parameters: getattr(import_module(module), name)(parameters, lr=1e-4)  # type: ignore[no-any-return]


def _rounded(make: Make) -> Make:
    return lambda parameters: Float32Step(make(parameters))


def _converted(**options: Any) -> Make:
    return lambda parameters: to_bitsandbytes(AdamW(parameters, lr=1e-4), **options)


FLOAT32: dict[str, Make] = {
    "torch AdamW, one weight at a time": lambda p: AdamW(p, lr=1e-4, foreach=False),
    "torch AdamW, foreach": lambda p: AdamW(p, lr=1e-4, foreach=True),
    "torch AdamW, fused": lambda p: AdamW(p, lr=1e-4, fused=True),
    "bitsandbytes AdamW8bit": _of("bitsandbytes.optim.AdamW8bit"),
    "bitsandbytes PagedAdamW8bit": _of("bitsandbytes.optim.PagedAdamW8bit"),
    "torch Adafactor": lambda p: Adafactor(p, lr=1e-4),
    "bitsandbytes Lion": _of("bitsandbytes.optim.Lion"),
    "bitsandbytes Lion8bit": _of("bitsandbytes.optim.Lion8bit"),
    "torchao AdamW4bit": _of("torchao.optim.AdamW4bit"),
    "Optimizer8bit": _converted(),
    "Optimizer8bit, paged": _converted(paged=True),
}
BFLOAT16: dict[str, Make] = {
    "torch AdamW, fused": FLOAT32["torch AdamW, fused"],
    "bitsandbytes AdamW8bit": _of("bitsandbytes.optim.AdamW8bit"),
    "Optimizer8bit": _converted(),
    "StochasticRounding, fused AdamW": _rounded(FLOAT32["torch AdamW, fused"]),
    "StochasticRounding, Optimizer8bit": _rounded(_converted()),
}


def cases(options: Options) -> Iterator[Named]:
    """All that there are on the device."""
    for dtype, makes in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        for name, make in makes.items():
            if options.device == "cuda" or "aged" not in name:  # there is nothing to page on the CPU
                yield Named(f"{dtype}, {name}", (name, dtype, make))


def shapes_of(options: Options) -> list[torch.Size]:
    """Shapes of the weights of a GPT-2, without network and without memory."""
    import transformers

    width, layers, heads = (1600, 48, 25) if options.device == "cuda" else (768, 12, 12)
    layers = 1 if options.small else layers
    with torch.device("meta"):
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads))
    return [parameter.shape for parameter in net.parameters()]


def measure(case: Named, options: Options, row: Row) -> Row:
    """Median and extremes of the time of a step, bytes of state, and on CUDA bytes of scratch memory."""
    torch.manual_seed(0)
    (name, dtype, make), cuda = case.of, options.device == "cuda"
    made = {"device": options.device, "dtype": getattr(torch, dtype)}
    parameters = [nn.Parameter(torch.randn(shape, **made) * 0.02) for shape in shapes_of(options)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = make(parameters)
    for _ in range(2):
        optimizer.step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    clock = time.perf_counter if cuda else time.process_time
    seconds = []
    for _ in range(options.steps):
        started = clock()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    state_bytes = sum(v.numel() * v.element_size() for v in states)
    return {
        "optimizer": name,
        "dtype": dtype,
        "seconds": statistics.median(seconds),
        "seconds_fastest": min(seconds),
        "seconds_slowest": max(seconds),
        "state_bytes": state_bytes,
        "state_bytes_per_parameter": state_bytes / sum(parameter.numel() for parameter in parameters),
        **({"scratch_bytes": torch.cuda.max_memory_allocated() - before} if cuda else {}),
    }


BENCHMARK = Benchmark(
    "optimizer_step_{device}.json",
    cases,
    (Stage(measure),),
    lambda rows, options: {"num_parameters": sum(shape.numel() for shape in shapes_of(options)), "rows": rows},
    lambda row: f"{1e3 * row['seconds']:9.2f} ms, {format_bytes(row['state_bytes'])} of state",
    arguments=(DEVICE, SMALL, ("--steps", {"type": int, "default": 20})),
)
