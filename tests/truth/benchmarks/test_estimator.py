"""Predictions for CUDA beside what an H200 measured: `estimator_cuda.json` needs no card to be compared with again."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.estimator import run as estimator
from benchmarks.estimator.cases import Case
from benchmarks.estimator.run import RESULTS, predict

MEASURED = {row["name"]: row for row in json.loads((RESULTS / "estimator_cuda.json").read_text())["rows"]}


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
    found, measured = predict(Case(**row["case"]), "cuda", (9, 0))["predicted"], row["measured"]
    assert found["allocated_bytes"] == pytest.approx(measured["allocated_bytes"], rel=0.001)
    assert found["reserved_bytes"] == pytest.approx(measured["reserved_bytes"], rel=0.005)
    requested = found["allocated_bytes"] - found["spare_bytes"]
    assert requested == pytest.approx(measured["requested_bytes"], abs=1 << 20)


def renew(file: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    arguments = ["run", "--device", "cuda", "--predict-only", "--out", str(file), *more]
    monkeypatch.setattr("sys.argv", arguments)
    return estimator.main()


def test_predictions_are_renewed_beside_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = [MEASURED[name] for name in list(MEASURED)[:2]]
    new = {"allocated_bytes": 2 * old[0]["measured"]["allocated_bytes"], "reserved_bytes": 0, "seconds": 1.0}
    asked = {}

    def fake(case: Case, device: str, capability: tuple[int, int]) -> dict[str, Any]:
        if case.name != old[0]["name"]:
            raise RuntimeError("not this one")
        return {"name": case.name, "predicted": {**new, "asked": [device, capability]}}

    monkeypatch.setattr(estimator, "predict", fake)
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"rows": old, "versions": {"torch": "then"}}))
    assert renew(file, monkeypatch) == 1  # one failed
    document = json.loads(file.read_text())
    asked = document["rows"][0]["predicted"].pop("asked")
    assert asked == ["cuda", [9, 0]]  # what it was measured on
    assert document["rows"][0] == {**old[0], "predicted": new, "error_allocated": 1.0, "error_reserved": -1.0}
    assert document["rows"][1] == old[1]
    assert document["versions"] == {"torch": "then"}
    assert "torch" in document["predicted_with"]
    assert renew(file, monkeypatch, "--only", "no such case") == 1
    assert renew(file, monkeypatch, "--only", old[0]["name"]) == 0
