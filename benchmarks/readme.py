"""What the README shows of committed results."""

import json
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.marks import RESULTS

_TECHNIQUES = {
    "optimizer_8bit": ("optimizer states: 8 to 2 bytes per parameter", "lossy; update of quantized states"),
    "bf16_stochastic_rounding": ("weights and gradients: 8 to 4 bytes", "lossy; random bits in each update"),
    "host_master_weights": ("12 of 16 bytes, kept in host memory", "lossy (bf16); transfers in each step"),
    "gradient_release": ("all gradients but one", "exact; clips by value only"),
    "activation_checkpointing": ("activations of all blocks but one", "exact; a second forward pass"),
    "chunked_loss": ("logits: 6 bytes per token and vocabulary entry", "exact; more kernels"),
    "lora": ("gradients and states of frozen weights", "trains adapters only"),
    "micro_batching": ("activations: a part of the batch at a time", "exact; smaller kernels"),
}
"""What the README's techniques save and cost, in words."""


def techniques(document: dict[str, Any]) -> str:
    """The table of techniques: measured are live bytes and processor time of a step, as parts of the plain step's."""
    rows = {row["name"]: row for row in document["rows"]}
    lines = ["| technique | saves | costs | memory | time |", "|---|---|---|---:|---:|"]
    for name, (saves, costs) in _TECHNIQUES.items():
        memory, time = (rows[name][key] / rows["plain"][key] for key in ("measured_bytes", "cpu_s_per_step"))
        lines.append(f"| `{name}` | {saves} | {costs} | {memory:.2f} | {time:.2f} |")
    return "\n".join(lines)


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
