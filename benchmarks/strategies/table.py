"""Write what strategies keep on a rank into their page: `python -m benchmarks.strategies.table`."""

import json
from typing import Any

from benchmarks.marks import insert
from benchmarks.precision.table import ROOT
from benchmarks.strategies.run import RESULTS

PAGE = ROOT / "docs" / "guides" / "multi_gpu.md"
MARK = "strategies_cpu"
TITLES = {
    "zero_3_offload": "ZeRO-3, `offload_optimizer`, `offload_parameters`",
}


def render(document: dict[str, Any]) -> str:
    """Bytes per parameter that one of the ranks keeps between two steps."""
    numel = document["parameters"]
    lines = [
        f"Measured on the CPU, where device and host memory are one: {numel / 1e6:.0f} million parameters on "
        f"{document['ranks']} ranks, `{document['precision']}`,",
        "tensors that a rank keeps between two steps: activations are gone, buckets and buffers included",
        f"(`benchmarks/results/{RESULTS.name}`, by `{document['command']}`):",
        "",
        "| strategy | bytes per parameter in memory | on disk, both ranks |",
        "|---|---|---|",
    ]
    for name, row in document["rows"].items():
        disk = f"{row['disk_bytes'] / numel:.1f}" if row["disk_bytes"] else ""
        lines.append(f"| {TITLES.get(name, f'`memfit_{name}`')} | {row['live_bytes'] / numel:.1f} | {disk} |")
    return "\n".join(lines)


def main() -> None:
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), MARK, render(document)), encoding="utf-8")


if __name__ == "__main__":
    main()
