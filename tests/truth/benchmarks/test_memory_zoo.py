"""A sample of the memory zoo: predicted peaks are the true ones, and a trace changes nothing."""

import json
import os

import pytest

from benchmarks.memory_zoo.modules import ZOO
from benchmarks.memory_zoo.run import RESULT, apart, summary
from benchmarks.runner import read
from tests.helpers.strategy_launch import run_program

SAMPLE = (
    "MSELoss",
    "BCELoss",
    "topk",
    "sort",
    "scatter_add",
    "rfft",
    "mixed types",
    "Conv3d",
    "Conv2d channels last",
    "Conv2d 1x1 strided",
    "Conv2d depthwise",
    "ConvTranspose3d",
    "ConvNeXt",
    "cdist",
    "mixtral",
    "GroupNorm",
    "attention, masked",
    "GRU",
    "Embedding",
    "GAN",
    "average of weights",
    "memory bank",
    "diffusion U-Net",
    "residual CNN",
    "LayerNorm (bf16-mixed)",
    "diffusion U-Net (bf16-mixed)",
    "Conv2d (bf16-mixed)",
    "mixtral (bf16-mixed)",
)
"""Of every kind, and fast."""

CODE = """
import json, sys
from benchmarks.memory_zoo.run import examine
print("ROWS " + json.dumps({name: examine(name) for name in json.loads(sys.argv[1])}))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """In a process of its own, as others have read allocation events before."""
    empty, cache = tmp_path_factory.mktemp("empty"), str(tmp_path_factory.mktemp("cache"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_CACHE": cache}
    done = run_program(CODE, json.dumps(SAMPLE), cwd=empty, env=environment, timeout=280)
    line = next((line for line in done.stdout.splitlines() if line.startswith("ROWS ")), "")
    assert line, done.stderr[-3000:]
    found: dict[str, dict[str, object]] = json.loads(line.removeprefix("ROWS "))
    return found


@pytest.mark.parametrize("name", SAMPLE)
def test_the_predicted_peak_is_the_true_one(rows: dict[str, dict[str, object]], name: str) -> None:
    difference = apart(rows[name])
    assert difference is not None, rows[name].get("refused")
    assert abs(difference) < 0.001
    assert rows[name]["remarks"] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_a_trace_changes_nothing(rows: dict[str, dict[str, object]], name: str) -> None:
    assert rows[name]["changed"] == []


def test_the_results_keep_what_is_promised() -> None:
    document = read(RESULT)
    assert [row["name"] for row in document["rows"]] == list(ZOO), "run `python -m benchmarks memory_zoo`"
    figures = summary(document["rows"])
    assert figures["modules"] >= 80
    assert figures["median"] <= 0.001
    assert figures["p95"] <= 0.01
    assert figures["worst_under_unnamed"] >= -0.02
    assert figures["changed"] == 0
