"""Float32 weights and AdamW's states on the host: `HostMaster` against torchao's `CPUOffloadOptimizer`.

    python -m benchmarks.host_master.run --device cuda [--model gpt2-xl] [--steps 10]

Both train a GPT-2 with random weights on random tokens, bfloat16 on the device, without activation checkpointing, and
AdamW's fused kernel on the host. They don't promise the same: torchao keeps bfloat16 weights as its optimizer finds
them, `HostMaster` float32 ones. Each runs in a process of its own; what is not installed or runs out of memory is
recorded as such.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.record import write
from lightning_memfit.memory.process import peak_rss_bytes
from lightning_memfit.optim.host_master import HostMaster

RESULTS = Path(__file__).parents[1] / "results"
SIZES = {"gpt2": (768, 12, 12), "gpt2-xl": (1600, 48, 25)}
WARMUP = 3
METHODS = ("AdamW on the device", "HostMaster", "torchao CPUOffloadOptimizer")


def make_optimizer(method: str, module: nn.Module) -> Any:
    """The optimizer of one method over a module that lies on the device."""
    if method == METHODS[0]:
        return torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    if method == METHODS[1]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
        HostMaster(optimizer)
        return optimizer
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(module.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-5, fused=True)


def measure(method: str, model: str, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """Median time of a step and peaks of the device and of the process."""
    import transformers

    width, layers, heads = SIZES[model]
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, use_cache=False)
    module = transformers.GPT2LMHeadModel(config).to(device, torch.bfloat16)
    optimizer = make_optimizer(method, module)
    batch = torch.randint(0, config.vocab_size, (1, tokens), device=device)
    seconds, losses = [], []
    for _ in range(WARMUP + steps):
        started = time.perf_counter()
        loss = module(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # waits for the device
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    timed = seconds[WARMUP:]
    return {
        "seconds": statistics.median(timed),
        "seconds_fastest": min(timed),
        "seconds_slowest": max(timed),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "peak_rss_bytes": peak_rss_bytes(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def one(method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a method, or say why that failed."""
    try:
        figures = measure(method, arguments.model, arguments.device, arguments.tokens, arguments.steps)
    except (ImportError, RuntimeError, AssertionError) as error:
        figures = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {"name": method, **figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", choices=tuple(SIZES), default="gpt2-xl")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the one sample of a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--method", choices=METHODS, default=None, help="measure this one here, and print its figures")
    arguments = parser.parse_args()
    if arguments.method is not None:
        print(json.dumps(one(arguments.method, arguments)))
        return 0
    options = [f"--{name}={getattr(arguments, name)}" for name in ("device", "model", "tokens", "steps")]
    command = ["python", "-m", "benchmarks.host_master.run", *options]
    rows = []
    for method in METHODS:
        ended = subprocess.run(
            [sys.executable, *command[1:], "--method", method], stdout=subprocess.PIPE, text=True, check=False
        )
        lines = ended.stdout.splitlines()
        rows.append(json.loads(lines[-1]) if lines else {"name": method, "failed": f"ended with {ended.returncode}"})
        print(json.dumps(rows[-1]), flush=True)
    write(
        arguments.out or RESULTS / f"host_master_{arguments.device}.json", {"command": " ".join(command), "rows": rows}
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
