"""Predictions for CUDA beside what an H200 measured: `estimator_cuda.json` needs no card to be compared with again."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.estimator import run as estimator
from benchmarks.estimator.cases import Case
from benchmarks.runner import read

MEASURED = {row["name"]: row for row in read("estimator_cuda.json")["rows"]}


@pytest.mark.parametrize(
    "name",
    [
        "gpt2 b8 s1024 bf16-mixed adamw math",
        "gpt2 b8 s1024 bf16-true adamw_fused",
        "bert-large b4 s512 32-true adamw",
        "bert-large b8 s512 bf16-true adamw_8bit",
    ],
)
def test_an_h200_allocated_and_reserved_what_is_predicted(name: str) -> None:
    row = MEASURED[name]
    found, measured = estimator.predicted(Case(**row["case"]), "cuda", (9, 0)), row["measured"]
    assert found["allocated_bytes"] == pytest.approx(measured["allocated_bytes"], rel=0.001)
    assert found["reserved_bytes"] == pytest.approx(measured["reserved_bytes"], rel=0.005)
    requested = found["allocated_bytes"] - found["spare_bytes"]
    assert requested == pytest.approx(measured["requested_bytes"], abs=1 << 20)


def test_predictions_are_renewed_beside_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = [MEASURED[name] for name in list(MEASURED)[:2]]
    new = {"allocated_bytes": 2 * old[0]["measured"]["allocated_bytes"], "reserved_bytes": 0, "seconds": 1.0}

    def fake(case: Case, device: str, capability: tuple[int, int]) -> dict[str, Any]:
        if case.name != old[0]["name"]:
            raise RuntimeError("not this one")
        return {**new, "asked": [device, capability]}

    monkeypatch.setattr(estimator, "predicted", fake)
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"rows": old}))
    options = ["--device", "cuda", "--predict", "--output", str(file)]
    assert main(["estimator", *options]) == 1  # one failed
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    first, second = (rows[one["name"]] for one in old)
    assert first["predicted"].pop("asked") == ["cuda", [9, 0]]  # what it was measured on
    assert first == {**old[0], "predicted": new, "error_allocated": 1.0, "error_reserved": -1.0}
    assert second == old[1]
    assert main(["estimator", "no such case", *options]) == 1
    assert main(["estimator", old[0]["name"], *options]) == 0
