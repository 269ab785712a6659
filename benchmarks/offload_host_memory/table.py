"""Host memory under DeepSpeed, predicted and measured."""

from typing import Any

from benchmarks.offload_host_memory.predict import predict
from benchmarks.offload_host_memory.run import RESULTS


def predicted_bytes(row: dict[str, Any]) -> int:
    """Peak of host memory on the CPU, by the model as it is now."""
    return predict(row).host_peak_bytes


def error(row: dict[str, Any]) -> float:
    """Predicted over measured, minus one."""
    return predicted_bytes(row) / int(row["peak_bytes"]) - 1


def render(document: dict[str, Any]) -> str:
    """How far predictions are off, over all cases; the rows are in the file."""
    rows = document["rows"]
    errors = [error(row) for row in rows]
    return (
        f"Over {len(rows)} runs of GPT-2 on the CPU with 1 and 2 ranks under ZeRO-2, -3 and all kinds of offloading, "
        f"the predicted peak of a rank's resident memory is {min(errors):+.1%} to {max(errors):+.1%} off "
        f"(`benchmarks/results/{RESULTS.name}`, by `{document['command']}`)."
    )
