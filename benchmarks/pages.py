"""Write every page, and every part of a page, that is made from committed results: `python -m benchmarks.pages`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import bench_pages, checkpointing_budget, exactness, precision, recipe_sizes, techniques
from benchmarks.estimator import accuracy, example
from benchmarks.finder import run as finder
from benchmarks.gpt2xl import from_disk, on_cpu
from benchmarks.gpu import pages as gpu
from benchmarks.host_memory import peaks
from benchmarks.memory_zoo import run as memory_zoo
from benchmarks.planner import gpt2xl_plans, pairs
from benchmarks.runner import read
from benchmarks.sharded_traces import published
from benchmarks.sharded_traces import run as sharded_traces
from benchmarks.step_cost import run as step_cost
from benchmarks.techniques_sweep import architectures, combinations
from benchmarks.text import RESULTS, ROOT, insert
from cli.bench import FOLDER as EXPERIMENTS
from cli.recipe_files import SIZES

DOCS = ROOT / "docs"
PARTS: tuple[tuple[str, str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("../README.md", "techniques", techniques.RESULT, techniques.readme),
    ("benchmarks/architectures.md", "verdicts", architectures.RESULT, architectures.text),
    ("benchmarks/combinations.md", "verdicts", combinations.RESULT, combinations.text),
    ("benchmarks/exactness.md", "verdicts", exactness.RESULT, exactness.text),
    ("benchmarks/memory_zoo.md", "zoo", memory_zoo.RESULT, memory_zoo.text),
    ("benchmarks/sharded_traces.md", "llama31", published.RESULT, published.text),
    ("benchmarks/sharded_traces.md", "sharded_traces", sharded_traces.RESULT, sharded_traces.text),
    ("guides/chats.md", "sizes", str(SIZES), recipe_sizes.text),
    ("guides/estimate.md", "estimate of GPT-2 XL", example.RESULT, example.render),
    ("guides/micro_batching.md", "comparison", "finder_cpu.json", finder.text),
    ("guides/nvme.md", "gpt2xl_zero_infinity", from_disk.RESULT, from_disk.text),
    ("guides/nvme.md", "offload_host_memory", peaks.RESULT, peaks.text),
    ("guides/one_card.md", "live bytes", on_cpu.RESULT, on_cpu.text),
    ("guides/plan.md", "plans", gpt2xl_plans.RESULT, gpt2xl_plans.text),
    ("guides/plan.md", "pairs", pairs.RESULT, pairs.text),
    ("techniques/bf16_stochastic_rounding.md", "precision_final_loss", precision.RESULT, precision.text),
    ("techniques/activation_checkpointing.md", "checkpointing_budget", checkpointing_budget.RESULT,
     checkpointing_budget.text),
)  # fmt: skip
"""What stands between two marks of a page: page, mark, file of results, and what makes text of it."""


def pages(folder: Path = gpu.FOLDER) -> dict[Path, str]:
    """Every file that is made from results, with the text that they give.

    Args:
        folder: Results of `make gpu`.
    """
    made = {
        DOCS / "accuracy.md": accuracy.page(),
        DOCS / "bert_large.svg": picture(),
        DOCS / "benchmarks" / "gpu.md": gpu.page(folder),
        DOCS / "benchmarks" / "step_cost.md": step_cost.page(),
        **techniques.pages(),
    }
    for file in sorted(EXPERIMENTS.glob("*.yaml")):
        made[DOCS / "benchmarks" / f"{file.stem}.md"] = bench_pages.page(file)
    for page, mark, result, text_of in PARTS:
        path = (DOCS / page).resolve()
        made[path] = insert(made.get(path) or path.read_text(encoding="utf-8"), mark, text_of(read(result)))
    return made


def picture() -> str:
    """Memory of BERT-large by technique, measured (bars) and predicted (marks), as SVG."""
    files = (json.loads(path.read_text()) for path in (RESULTS / "bert_large_cuda_full").glob("*.json"))
    rows = sorted(files, key=lambda row: -row["measured"]["allocated_bytes"])
    title = f"BERT-large on {rows[0]['hardware']['device']}: peak in GiB, measured (bars) and predicted (marks)"
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="840" height="360" font-family="sans-serif" font-size="13">'
    shapes = [head, '<rect width="840" height="360" fill="#fff"/>', f'<text x="9" y="24" font-size="16">{title}</text>']
    for y, row in zip(range(40, 40 + 26 * len(rows), 26), rows, strict=True):
        measured, predicted = (row[kind]["allocated_bytes"] / 2**30 for kind in ("measured", "predicted"))
        shapes += [
            f'<text x="440" y="{y + 14}" text-anchor="end">{escape(row["title"])}</text>',
            f'<rect x="450" y="{y}" width="{40 * measured:.1f}" height="18" fill="#5b8ff9"/>',
            f'<rect x="{449 + 40 * predicted:.1f}" y="{y - 2}" width="2" height="22" fill="#222"/>',
            f'<text x="{458 + 40 * measured:.1f}" y="{y + 14}">{measured:.2f}</text>',
        ]
    return "\n".join([*shapes, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=gpu.FOLDER, help="results of `make gpu`")
    for path, text in pages(parser.parse_args().folder).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
