"""What GPT-2 XL needed under 12 GiB, planned and measured."""

from pathlib import Path
from typing import Any

RESULT = Path(__file__).with_name("result.json")
GIB = 1 << 30


def render(document: dict[str, Any]) -> str:
    """The plan, its peaks and the time of a step."""
    seconds = max(step["step_seconds"] for step in document["optimizer_steps"])
    predicted, measured, resident = (document[f"{name}_bytes"] / GIB for name in ("predicted", "measured", "peak_rss"))
    return (
        f"{document['setting']}: {predicted:.2f} GiB predicted, {measured:.2f} GiB measured, "
        f"{resident:.2f} GiB resident, at most {seconds:.0f} s per step."
    )
