"""Host memory as predicted, beside what runs took; the predictions are made anew each time."""

import pytest

from benchmarks.host_memory.cases import cases
from benchmarks.host_memory.peaks import RESULT, error, predict
from benchmarks.runner import read
from lightning_memfit.memory import MIB, Tier

DOCUMENT = read(RESULT)


def test_every_case_was_measured() -> None:
    assert [row["name"] for row in DOCUMENT["rows"]] == [case.name for case in cases()]


@pytest.mark.parametrize("row", DOCUMENT["rows"], ids=lambda row: f"{row['kind']}-{row['size']}-{row['ranks']}")
def test_prediction_keeps_its_bar(row: dict) -> None:
    """A run that takes more than was asked for swaps, or is killed; one that takes much less was refused in vain."""
    assert abs(error(row)) <= 0.05
    kept = predict(row).kept
    pinned = kept.total(Tier.PINNED_HOST) if row["kind"].startswith("disk") else 0
    assert row["locked_bytes"] == pytest.approx(pinned, abs=2 * MIB)
