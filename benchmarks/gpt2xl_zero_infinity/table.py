"""GPT-2 XL trained from disk, as predicted and as measured."""

from pathlib import Path
from typing import Any

from lightning_memfit.memory import format_bytes

RESULT = Path(__file__).with_name("result.json")


def render(document: dict[str, Any]) -> str:
    """What the preflight said beforehand beside what was measured, then every step."""
    tiers = {tier: sum(sizes.values()) for tier, sizes in document["predicted"]["bytes_per_rank"].items()}
    in_memory = sum(size for tier, size in tiers.items() if tier != "disk")
    hardware = document["hardware"]
    runs = document["raw_bytes_per_s"].values()
    raw = {name: max(rates["deepspeed_io"][name] for rates in runs) for name in ("read", "write")}
    lines = [
        f"GPT-2 XL's true architecture, random weights, {document['sequence_length']} tokens a step, on a machine with "
        f"{hardware['cores']} cores, {format_bytes(hardware['memory_bytes'])} and no GPU",
        "(`benchmarks/gpt2xl_zero_infinity/result.json`, by its `run.py`):",
        "",
        "| | predicted by the preflight | measured |",
        "|---|---|---|",
        f"| memory | {format_bytes(in_memory)}, and libraries and activations | "
        f"{format_bytes(document['peak_rss_bytes'])}, peak of the whole process |",
        f"| disk | {format_bytes(tiers['disk'])} | {format_bytes(document['peak_disk_bytes'])} |",
        "",
        "| step | forward and backward | update | read | written | of the drive's raw bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    for number, step in enumerate(document["optimizer_steps"], 1):
        read, written = (step[f"passes_{what}_bytes"] + step[f"update_{what}_bytes"] for what in ("read", "written"))
        of_step, of_update = step["step_share_of_raw"], step["update_share_of_raw"]
        lines.append(
            f"| {number} | {step['passes_seconds']:.0f} s | {step['update_seconds']:.0f} s | {read / 1e9:.1f} GB | "
            f"{written / 1e9:.1f} GB | {of_step:.0%}, in the update {of_update:.0%} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"Raw is what DeepSpeed's own `ds_io` reads and writes there: {raw['read'] / 1e9:.2f} and "
            f"{raw['write'] / 1e9:.2f} GB/s, the better of before and after.",
            "The first step finds no states to read, and its files are new. Other programs ran there meanwhile.",
            "Memory beyond the prediction is libraries, what a step holds for a moment, and what the allocator kept.",
        ]
    )
