"""Run a benchmark: `python -m benchmarks NAME [--help]`; without a name, list them."""

import ast
import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path

from benchmarks.runner import Benchmark, command

MODULES = {
    "estimator": "estimator.run",
    "bert_large_published": "estimator.published",
    "estimate_gpt2xl": "estimator.example",
    "memory_zoo": "memory_zoo.run",
    "sharded_traces": "sharded_traces.run",
    "published": "sharded_traces.published",
    "architectures": "techniques_sweep.architectures",
    "combinations": "techniques_sweep.combinations",
    "techniques": "techniques",
    "step_cost": "step_cost.run",
    "optimizer_step": "optimizer_step",
    "precision": "precision",
    "finder": "finder.run",
    "checkpointing_budget": "checkpointing_budget",
    "planner_pairs": "planner.pairs",
    "planner_gpt2xl": "planner.gpt2xl_plans",
    "planner_operators": "planner.operators",
    "step_time": "gpu.step_time",
    "strategies": "host_memory.strategies",
    "offload_host_memory": "host_memory.peaks",
    "deepspeed_buffers": "host_memory.buffers",
    "gpt2xl_live_bytes": "gpt2xl.on_cpu",
    "gpt2xl_zero_infinity": "gpt2xl.from_disk",
    "quickstart": "gpt2xl.on_cpu",
    "recipe_sizes": "recipe_sizes",
    "recipe_plans": "recipe_sizes",
}
"""Where benchmarks are, by name. A module has `BENCHMARK`, or several in `BENCHMARKS`, by name."""


def benchmark_of(name: str) -> tuple[Benchmark, str]:
    """A benchmark, and what it says of itself."""
    module = import_module(f"benchmarks.{MODULES[name]}")
    found = module.BENCHMARKS[name] if hasattr(module, "BENCHMARKS") else module.BENCHMARK
    assert isinstance(found, Benchmark)
    return found, module.__doc__ or ""


def main(argv: list[str]) -> int:
    name, *rest = argv or ("--help",)
    if name in MODULES:
        return command(*_with_name(name), rest)
    print(__doc__, end="\n\n")
    for known, module in MODULES.items():
        file = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
        print(f"{known:24s} {(ast.get_docstring(ast.parse(file.read_text())) or '').splitlines()[0]}")
    return 0 if name in ("-h", "--help") else 2


def _with_name(name: str) -> tuple[Benchmark, str, str]:
    found, description = benchmark_of(name)
    return found, name, description


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
