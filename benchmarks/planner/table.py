"""Plans for GPT-2 XL on machines of many sizes."""

from collections import Counter
from typing import Any

from benchmarks.marks import RESULTS as FOLDER
from lightning_memfit.memory import format_bytes

RESULTS = FOLDER / "planner_gpt2xl.json"
DEFAULT = ["8bit", "bf16", "exact", "stochastic", "tf32"]


def render(document: dict[str, Any]) -> str:
    """One row per machine: what there is, what the plan is, and what it needs of every tier on each device."""
    lines = [
        "| device | host | disk | allowed | plan | micro-batch | blocks | device | host | disk | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(row) for row in document["rows"])])


def _row(row: dict[str, Any]) -> str:
    plan, allow = row["plan"], row["allow"]
    count = f"{plan['devices']} x " if plan["devices"] > 1 else ""
    disk = f"{row['disk_gib']} GiB" if row["disk_gib"] else ""
    start = f"| {count}{plan['device'].removeprefix('device of ')} | {row['host_gib']} GiB | {disk} | "
    start += "default" if allow == DEFAULT else ", ".join(allow)
    if not plan["fits"]:
        return f"{start} | nothing fits: {plan['advice'][0]} | | | | | | |"
    setting = plan["setting"]
    names = [name for name in setting["techniques"] if name != "activation_checkpointing"]
    sizes = [format_bytes(plan["needed_bytes"])]
    for tiers in (("pinned_host", "host"), ("disk",)):
        size = sum(sum(plan["breakdown"].get(tier, {}).values()) for tier in tiers)
        sizes.append(format_bytes(size) if size else "")
    return (
        f"{start} | {', '.join(names) or 'plain'} | {setting['micro_batch_size']} x "
        f"{setting['accumulate_grad_batches']} | {_blocks(setting['techniques'])} | "
        f"{' | '.join(sizes)} | {plan['tokens_per_s']:.0f} |"
    )


def _blocks(techniques: dict[str, dict[str, Any]]) -> str:
    options = techniques.get("activation_checkpointing")
    if options is None:
        return "no recomputation"
    if "choices" not in options:
        return "keep products and attention" if options.get("keep") else "recompute all"
    return ", ".join(f"{count} {choice}" for choice, count in sorted(Counter(options["choices"]).items()))
