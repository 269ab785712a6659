"""Write every page, and every part of a page, that is made from committed results: `python -m benchmarks.pages`."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import bench_pages, readme
from benchmarks.checkpointing_budget import table as checkpointing_budget
from benchmarks.estimator import example
from benchmarks.estimator import table as estimator
from benchmarks.gpt2xl_from_plan import table as gpt2xl_from_plan
from benchmarks.gpt2xl_live_bytes import table as gpt2xl_live_bytes
from benchmarks.gpt2xl_zero_infinity import table as gpt2xl_zero_infinity
from benchmarks.gpu import pages as gpu
from benchmarks.marks import RESULTS, ROOT, insert
from benchmarks.memory_zoo import table as memory_zoo
from benchmarks.micro_batching import table as micro_batching
from benchmarks.offload_host_memory import table as offload_host_memory
from benchmarks.planner import pairs_table
from benchmarks.planner import table as planner
from benchmarks.planner.models import SETS
from benchmarks.precision import table as precision
from benchmarks.sharded_traces import published
from benchmarks.sharded_traces import table as sharded_traces
from benchmarks.step_cost import table as step_cost
from benchmarks.techniques import pages as techniques
from benchmarks.techniques_sweep import architectures, combinations
from benchmarks.techniques_sweep import table as techniques_sweep
from cli.bench import FOLDER as EXPERIMENTS


@dataclass(frozen=True)
class Part:
    """What stands between two marks of a page."""

    page: str
    """From the root of the checkout."""
    mark: str
    result: Path
    """The JSON file that it is made from."""
    render: Callable[[dict[str, Any]], str]


PARTS = (
    Part("README.md", "techniques", RESULTS / "techniques_cpu.json", readme.techniques),
    Part("docs/benchmarks/architectures.md", "verdicts", architectures.RESULT, techniques_sweep.architectures),
    Part("docs/benchmarks/combinations.md", "verdicts", combinations.RESULT, techniques_sweep.combinations),
    Part("docs/benchmarks/exactness.md", "verdicts", micro_batching.EXACTNESS_RESULT, micro_batching.verdicts),
    Part("docs/benchmarks/memory_zoo.md", "zoo", memory_zoo.RESULT, memory_zoo.text),
    Part("docs/benchmarks/sharded_traces.md", "llama31", published.RESULT, published.text),
    Part("docs/benchmarks/sharded_traces.md", "sharded_traces", sharded_traces.RESULT, sharded_traces.text),
    Part("docs/guides/estimate.md", "estimate of GPT-2 XL", example.RESULT, example.render),
    Part("docs/guides/micro_batching.md", "comparison", micro_batching.RESULT, micro_batching.table),
    Part("docs/guides/nvme.md", "gpt2xl_zero_infinity", gpt2xl_zero_infinity.RESULT, gpt2xl_zero_infinity.render),
    Part("docs/guides/nvme.md", "offload_host_memory", offload_host_memory.RESULTS, offload_host_memory.render),
    Part("docs/guides/one_card.md", "live bytes", gpt2xl_live_bytes.RESULT, gpt2xl_live_bytes.render),
    Part("docs/guides/plan.md", "plans", planner.RESULTS, planner.render),
    Part("docs/guides/plan.md", "pairs", RESULTS / SETS["known"].file, pairs_table.render),
    Part("docs/guides/plan.md", "held-out pairs", RESULTS / SETS["held_out"].file, pairs_table.render),
    Part("docs/guides/plan.md", "from the plan", gpt2xl_from_plan.RESULT, gpt2xl_from_plan.render),
    Part("docs/techniques/bf16_stochastic_rounding.md", "precision_final_loss", precision.RESULTS, precision.render),
    Part(
        "docs/techniques/activation_checkpointing.md",
        "checkpointing_budget",
        checkpointing_budget.RESULTS,
        checkpointing_budget.render,
    ),
)


def pages(folder: Path = gpu.FOLDER) -> dict[Path, str]:
    """Every file that is made from results, with the text that they give.

    Args:
        folder: Results of `make gpu`.
    """
    made = {
        ROOT / "docs" / "accuracy.md": estimator.page(),
        ROOT / "docs" / "bert_large.svg": readme.picture(),
        ROOT / "docs" / "benchmarks" / "gpu.md": gpu.page(folder),
        ROOT / "docs" / "benchmarks" / "step_cost.md": step_cost.page(),
        **techniques.render(),
    }
    for file in sorted(EXPERIMENTS.glob("*.yaml")):
        made[ROOT / "docs" / "benchmarks" / f"{file.stem}.md"] = bench_pages.page(file)
    for part in PARTS:
        path = ROOT / part.page
        text = made.get(path) or path.read_text(encoding="utf-8")
        made[path] = insert(text, part.mark, part.render(json.loads(part.result.read_text(encoding="utf-8"))))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=gpu.FOLDER, help="results of `make gpu`")
    for path, text in pages(parser.parse_args().folder).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
