"""Host memory under DeepSpeed, predicted and measured."""

import json
from typing import Any

from benchmarks.gpt2xl_zero_infinity.table import RESULT as GPT2_XL
from benchmarks.offload_host_memory.predict import gpt2_xl_run, predict
from benchmarks.offload_host_memory.run import RESULTS
from lightning_memfit.estimate.deepspeed import deepspeed_memory
from lightning_memfit.memory import MIB, format_bytes

TITLES = {
    "zero_2": "`memfit_zero_2`",
    "zero_3": "`memfit_zero_3`",
    "zero_2_offload": "`memfit_zero_offload`",
    "zero_3_offload": "ZeRO-3, both on the host",
    "disk_optimizer": "optimizer on disk",
    "disk_parameters": "parameters on disk",
    "disk_both": "both on disk",
}


def predicted_bytes(row: dict[str, Any]) -> int:
    """Peak of host memory on the CPU, by the model as it is now."""
    return predict(row).host_peak_bytes


def error(row: dict[str, Any]) -> float:
    """Predicted over measured, minus one."""
    return predicted_bytes(row) / int(row["peak_bytes"]) - 1


def render(document: dict[str, Any]) -> str:
    """Every case, then what the model says of GPT-2 XL."""
    rows = document["rows"]
    errors = [error(row) for row in rows]
    lines = [
        "GPT-2 on the CPU, batches of one sample of 64 tokens, a rank's peak of resident memory beyond what it had",
        f"when a preflight looks, in {len(rows)} runs;",
        f"predictions {min(errors):+.1%} to {max(errors):+.1%} off (`benchmarks/results/{RESULTS.name}`, by "
        f"`{document['command']}`):",
        "",
        "| | parameters | ranks | weights | predicted | measured | | largest in | pinned |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        moment, _ = predict(row).host_peak
        pinned = f"{row['locked_bytes'] / MIB:.0f} MiB" if row["locked_bytes"] else ""
        lines.append(
            f"| {TITLES[row['kind']]} | {row['size']} | {row['ranks']} | {row['precision'].split('-')[0]} | "
            f"{predicted_bytes(row) / MIB:.0f} MiB | {row['peak_bytes'] / MIB:.0f} MiB | {error(row):+.1%} | "
            f"{moment} | {pinned} |"
        )
    kept = document["largest_with_freed_memory_kept"]["peak_bytes"]
    xl = deepspeed_memory(gpt2_xl_run()).host_peak_bytes
    measured = json.loads(GPT2_XL.read_text(encoding="utf-8"))["peak_rss_bytes"]
    return "\n".join(
        [
            *lines,
            "",
            f"The largest, of GPT-2 XL's width, took {kept / MIB:.0f} MiB where glibc kept freed memory as it likes.",
            f"For GPT-2 XL itself the model gives {format_bytes(xl)}",
            f"without activations, beside the {format_bytes(measured)} of the whole process that were measured above, "
            "with freed memory kept.",
        ]
    )
