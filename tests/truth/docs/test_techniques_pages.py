"""The techniques' pages say what the registry and the results say, and all have one shape."""

import pytest

from benchmarks.runner import read
from benchmarks.techniques import RESULT, page_of
from lightning_memfit.techniques.core.registry import TECHNIQUES

PAGES = sorted({page_of(technique) for technique in TECHNIQUES})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_one_shape(path):
    page = path.read_text()
    parts = ["\n**When to use it.** ", "\n## Use\n", "\n## Cost\n", "\n## Conflicts\n"]
    places = [page.index(part) for part in parts]
    assert page.startswith("# ")
    assert places == sorted(places)


def test_recorded_peaks_keep_their_bar():
    rows = read(RESULT)["rows"]
    names = {row["name"].partition(",")[0] for row in rows}
    assert names <= {"plain", *(technique.name for technique in TECHNIQUES)}
    for row in rows:
        if "measured_bytes" in row:
            assert abs(row["predicted_bytes"] / row["measured_bytes"] - 1) <= 0.03, row["name"]
