"""GPT-2 XL trained from disk, as predicted and as measured."""

from pathlib import Path
from typing import Any

from lightning_memfit.memory import format_bytes

RESULT = Path(__file__).with_name("result.json")


def render(document: dict[str, Any]) -> str:
    """What the preflight said beforehand beside what was measured, and the last step."""
    tiers = {tier: sum(sizes.values()) for tier, sizes in document["predicted"]["bytes_per_rank"].items()}
    in_memory = sum(size for tier, size in tiers.items() if tier != "disk")
    hardware = document["hardware"]
    runs = document["raw_bytes_per_s"].values()
    raw = {name: max(rates["deepspeed_io"][name] for rates in runs) for name in ("read", "write")}
    step = document["optimizer_steps"][-1]
    read, written = (step[f"passes_{what}_bytes"] + step[f"update_{what}_bytes"] for what in ("read", "written"))
    return "\n".join(
        [
            f"GPT-2 XL's true architecture, random weights, {document['sequence_length']} tokens a step, on "
            f"{hardware['cores']} cores with {format_bytes(hardware['memory_bytes'])} and no GPU",
            "(`benchmarks/gpt2xl_zero_infinity/result.json`, by its `run.py`):",
            "",
            "| | predicted by the preflight | measured |",
            "|---|---|---|",
            f"| memory | {format_bytes(in_memory)}, and libraries and activations | "
            f"{format_bytes(document['peak_rss_bytes'])}, the whole process with memory that glibc kept |",
            f"| disk | {format_bytes(tiers['disk'])} | {format_bytes(document['peak_disk_bytes'])} |",
            "",
            f"Step {len(document['optimizer_steps'])} took {step['passes_seconds']:.0f} s for forward and backward and "
            f"{step['update_seconds']:.0f} s for the update. It read {read / 1e9:.1f} GB and wrote {written / 1e9:.1f} "
            f"GB: {step['step_share_of_raw']:.0%} of the drive's raw {raw['read'] / 1e9:.2f} and "
            f"{raw['write'] / 1e9:.2f} GB/s (DeepSpeed's `ds_io`), {step['update_share_of_raw']:.0%} in the update.",
        ]
    )
