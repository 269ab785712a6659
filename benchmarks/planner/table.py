"""Plans for GPT-2 XL on machines of many sizes."""

from typing import Any

from benchmarks.marks import RESULTS as FOLDER
from lightning_memfit.memory import format_bytes

RESULTS = FOLDER / "planner_gpt2xl.json"
DEFAULT = ["8bit", "bf16", "exact", "stochastic", "tf32"]


def render(document: dict[str, Any]) -> str:
    """One row per GPU with what is allowed by default: what there is, the plan, and what it needs per device."""
    lines = [
        "| device | host, disk | plan | micro-batch | device | host | disk | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = (row for row in document["rows"] if row["allow"] == DEFAULT and row["plan"]["device"] != "CPU")
    return "\n".join([*lines, *map(_row, rows)])


def _row(row: dict[str, Any]) -> str:
    plan = row["plan"]
    count = f"{plan['devices']} x " if plan["devices"] > 1 else ""
    disk = f", {row['disk_gib']} GiB" if row["disk_gib"] else ""
    start = f"| {count}{plan['device'].removeprefix('device of ')} | {row['host_gib']} GiB{disk} |"
    if not plan["fits"]:
        return f"{start} nothing fits | | | | | |"
    setting = plan["setting"]
    sizes = [format_bytes(plan["needed_bytes"])]
    for tiers in (("pinned_host", "host"), ("disk",)):
        size = sum(sum(plan["breakdown"].get(tier, {}).values()) for tier in tiers)
        sizes.append(format_bytes(size) if size else "")
    return (
        f"{start} {', '.join(setting['techniques']) or 'plain'} | {setting['micro_batch_size']} x "
        f"{setting['accumulate_grad_batches']} | {' | '.join(sizes)} | {plan['tokens_per_s']:.0f} |"
    )
