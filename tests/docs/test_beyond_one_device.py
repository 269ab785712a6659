"""The pages on several devices and on disk show what was recorded."""

import json

from benchmarks.gpt2xl_zero_infinity import table as on_disk

RESULT = json.loads(on_disk.RESULT.read_text())


def test_page_shows_the_run_from_disk() -> None:
    page = on_disk.PAGE.read_text()
    made = on_disk.insert(page, on_disk.render(RESULT))
    assert made == page, "run `python -m benchmarks.gpt2xl_zero_infinity.table`"


def test_gpt2_xl_trains_from_disk_within_12_gib() -> None:
    assert RESULT["peak_rss_bytes"] < 12 * 2**30
    assert len(RESULT["optimizer_steps"]) >= 2
    assert RESULT["left_on_disk"] == []
    predicted = sum(RESULT["predicted"]["bytes_per_rank"]["disk"].values())
    assert abs(RESULT["peak_disk_bytes"] / predicted - 1) < 0.001
    later = RESULT["optimizer_steps"][1:]
    assert min(step["update_share_of_raw"] for step in later) > 0.7
