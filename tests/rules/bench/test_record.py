"""Records survive the way to disk and back, and every field is documented."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lightning_memfit.bench.record import NESTED, SCHEMA, Result, read_result

from .results import result

ROOT = Path(__file__).parents[3]


def test_to_disk_and_back(tmp_path):
    path = tmp_path / "deep" / "row.json"
    before = result()
    before.write(path)
    assert read_result(path) == before
    assert [file.name for file in path.parent.iterdir()] == ["row.json"]


def test_losses_that_diverged_are_json_for_every_reader(tmp_path):
    path = tmp_path / "row.json"
    replace(result(), loss_first=2.5, loss_last=math.inf).write(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    row = read_result(path)
    assert (row.loss_first, row.loss_last) == (2.5, math.inf)


def test_another_schema_is_refused():
    data = result().to_dict() | {"schema": SCHEMA + 1}
    with pytest.raises(ValueError, match=f"`schema={SCHEMA + 1}` is not {SCHEMA}"):
        Result.from_dict(data)


def test_prediction_error():
    assert result(predicted_bytes=110, measured_bytes=100).prediction_error == pytest.approx(0.1)
    assert result(predicted_bytes=None).prediction_error is None
    assert result(measured_bytes=None).prediction_error is None


def test_the_documented_fields_are_those_of_the_file():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    documented = re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE)
    inner = {name: [f"{name}.{one.name}" for one in fields(kind)] for name, kind in NESTED.items()}
    assert documented == [path for one in fields(Result) for path in inner.get(one.name, [one.name])]
