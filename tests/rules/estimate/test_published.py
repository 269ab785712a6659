"""BERT-large's published figures, which nobody here measured, by the software of their time."""

import pytest

from benchmarks.estimator.published import RESULT, ROWS, predicted
from benchmarks.runner import read
from lightning_memfit.memory import MIB


@pytest.mark.nightly_cases("micro_batch_check", "adam")
@pytest.mark.nightly_cases("adafactor")
@pytest.mark.parametrize("name", ["micro_batch", "micro_batch_checkpointing", "adafactor", "adam_8bit"])
def test_they_are_predicted(name):
    published = {row["name"]: row["published_mib"] * MIB for row in read(RESULT)["rows"]}
    found = predicted(ROWS[name], attention="eager", of_its_time=True)["total_bytes"]
    assert found == pytest.approx(published[name], rel=0.01)
