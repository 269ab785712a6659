"""Times on the CPU are those that were measured."""

import json
from pathlib import Path

import pytest

from lightning_memfit.techniques.core.step_cost import ROUNDING_CPU_SECONDS, cpu_seconds

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "optimizer_step_cpu.json"
DOCUMENT = json.loads(RESULTS.read_text())
SECONDS = {
    (row["dtype"], row["optimizer"]): row["seconds"] / DOCUMENT["num_parameters"]
    for row in DOCUMENT["rows"]
    if "failed" not in row
}


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("adamw", "torch AdamW, foreach"),
        ("adamw_fused", "torch AdamW, fused"),
        ("adamw_8bit", "Optimizer8bit"),
        ("adafactor", "torch Adafactor"),
        ("lion", "bitsandbytes Lion"),
        ("lion_8bit", "bitsandbytes Lion8bit"),
    ],
)
def test_times_per_parameter_are_the_recorded_ones(name, measured):
    assert cpu_seconds(name) == pytest.approx(SECONDS["float32", measured], rel=0.03)


def test_rounding_adds_what_was_recorded():
    added = SECONDS["bfloat16", "StochasticRounding, fused AdamW"] - SECONDS["bfloat16", "torch AdamW, fused"]
    assert pytest.approx(added, rel=0.03) == ROUNDING_CPU_SECONDS
