"""The page `docs/accuracy.md`."""

import json
import statistics
from typing import Any

from benchmarks.estimator import published
from benchmarks.estimator.collected import collect
from benchmarks.marks import RESULTS
from lightning_memfit.memory import MIB

_HEAD = """# How accurate the estimates are
This page is generated from all committed results by `python -m benchmarks.pages`.

## All results
Every run of any benchmark that has a predicted and a measured peak of live tensors, by the file or folder that holds
it.

{everything}

## How the estimator's own runs are compared
An estimate is made from a module without weights; a measurement runs three optimizer steps of the real module with
Lightning's Trainer in a process of its own. On the CPU the oracle is the list of allocation events of torch's profiler,
which sees the scratch memory of kernels, too; on CUDA it is `torch.cuda.max_memory_allocated` and
`max_memory_reserved`. MemTracker is torch's own tracker (`torch.distributed._tools.mem_tracker`), given the same
module, batch and order of operations on fake tensors; it can't follow bitsandbytes' optimizers or a loss scaler.
"""


def summary(errors: list[float]) -> dict[str, float]:
    """Median and largest absolute error, and the largest underestimate, as fractions."""
    absolute = sorted(abs(error) for error in errors)
    return {
        "runs": len(errors),
        "median": statistics.median(absolute),
        "p95": absolute[min(len(absolute) - 1, int(0.95 * len(absolute)))],
        "max": absolute[-1],
        "under": max(0.0, *(-error for error in errors)),
    }


def _percent(value: float) -> str:
    return f"{100 * value:+.3f} %"


def _summary_line(name: str, errors: list[float]) -> str:
    s = summary(errors)
    return (
        f"| {name} | {s['runs']} | {100 * s['median']:.4f} % | {100 * s['p95']:.3f} % | {100 * s['max']:.3f} % | "
        f"{100 * s['under']:.3f} % |"
    )


_SECTIONS = {
    "cpu": ("CPU", ""),
    "cuda": ("CUDA: H200", "The memory model was made with these runs; they are predicted anew when it changes.\n"),
    "cuda_h100": (
        "CUDA, held out: H100",
        "The same runs on a card that nothing was measured on before. Each was predicted on that machine before it "
        "ran, and the predictions are kept as they were.\n",
    ),
}
"""Files of results, by what follows `estimator_` in their names: the heading, and what there is to say."""


def render(document: dict[str, Any], device: str) -> str:
    """One section of the page."""
    rows = [row for row in document["rows"] if "failed" not in row]
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
    heading, remark = _SECTIONS[device]
    lines = [f"\n## {heading}", f"`{document['command']}` ({versions})\n", *([remark] if remark else [])]
    lines += ["| figure | runs | median error | 95th percentile | largest | most under |", "|---|---|---|---|---|---|"]
    lines.append(_summary_line("allocated", [row["error_allocated"] for row in rows]))
    if any("error_reserved" in row for row in rows):
        lines.append(_summary_line("reserved", [row["error_reserved"] for row in rows]))
    tracked = [row["mem_tracker"]["error"] for row in rows if "error" in row.get("mem_tracker", {})]
    if tracked:
        lines.append(_summary_line("MemTracker, allocated", tracked))
    reserved = any("error_reserved" in row for row in rows)
    lines += [
        "",
        "| run | measured MiB | predicted MiB | error |" + (" reserved |" if reserved else " MemTracker |") + " s |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda r: r["name"]):
        last = row["error_reserved"] if reserved else row.get("mem_tracker", {}).get("error")
        lines.append(
            f"| {row['name']} | {row['measured']['allocated_bytes'] / MIB:.1f} | "
            f"{row['predicted']['allocated_bytes'] / MIB:.1f} | {_percent(row['error_allocated'])} | "
            f"{_percent(last) if last is not None else '-'} | {row['predicted']['seconds']:.1f} |"
        )
    failed = [row for row in document["rows"] if "failed" in row]
    lines += [f"\nFailed: {row['name']}: {row['failed']}" for row in failed]
    return "\n".join(lines) + "\n"


def _everything() -> str:
    """One line for each file or folder of results, and device."""
    found = collect()
    lines = ["| results | device | runs | median error | largest | most under | where it is largest |"]
    lines.append("|---|---|---|---|---|---|---|")
    for source, device in dict.fromkeys((one.source, one.device) for one in found):
        rows = [one for one in found if (one.source, one.device) == (source, device)]
        s, worst = summary([row.error for row in rows]), max(rows, key=lambda row: abs(row.error))
        lines.append(
            f"| `{source}` | {device} | {s['runs']} | {100 * s['median']:.4f} % | {100 * s['max']:.3f} % | "
            f"{100 * s['under']:.3f} % | {worst.run} |"
        )
    s = summary([one.error for one in found])
    lines.append(
        f"| all | | {s['runs']} | {100 * s['median']:.4f} % | {100 * s['max']:.3f} % | {100 * s['under']:.3f} % | |"
    )
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    text = _HEAD.format(everything=_everything())
    for device, (heading, _) in _SECTIONS.items():
        path = RESULTS / f"estimator_{device}.json"
        if path.exists():
            text += render(json.loads(path.read_text()), device)
        else:
            text += (
                f"\n## {heading}\nNot measured yet. On a machine with a GPU: "
                f"`python -m benchmarks.estimator.run --device {device.partition('_')[0]}`, then this page's command.\n"
            )
    return text + published.table(json.loads(published.RESULT.read_text()))
