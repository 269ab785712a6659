"""What strategies keep on a rank."""

from typing import Any

from benchmarks.strategies.run import RESULTS

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
