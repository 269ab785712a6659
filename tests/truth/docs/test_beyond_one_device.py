"""The pages on several devices and on disk say what was recorded."""

from benchmarks.gpt2xl import from_disk
from benchmarks.host_memory import strategies
from benchmarks.runner import read

(RESULT,) = read(from_disk.RESULT)["rows"]
KEPT = read(strategies.RESULT)
ROWS = {row["strategy"]: row for row in KEPT["rows"]}


def test_gpt2_xl_trains_from_disk_within_12_gib() -> None:
    assert RESULT["peak_rss_bytes"] < 12 * 2**30
    assert len(RESULT["optimizer_steps"]) >= 2
    assert RESULT["left_on_disk"] == []
    predicted = sum(RESULT["predicted"]["bytes_per_rank"]["disk"].values())
    assert abs(RESULT["peak_disk_bytes"] / predicted - 1) < 0.001
    later = RESULT["optimizer_steps"][1:]
    assert min(step["update_share_of_raw"] for step in later) > 0.7


def test_strategies_keep_what_the_page_counts() -> None:
    """Weights, optimizer states and, where they stay between steps, gradients; the rest is buckets and buffers."""
    per_parameter = {name: row["live_bytes"] / KEPT["parameters"] for name, row in ROWS.items()}
    counted = {"ddp": 16.0, "fsdp2": 8.0, "zero_1": 8.0, "zero_2": 8.0, "zero_3": 7.0, "zero_offload": 10.0}
    for name, expected in counted.items():
        assert expected <= per_parameter[name] < expected + 1.5
    assert abs(ROWS["zero_infinity"]["disk_bytes"] / KEPT["parameters"] - 18) < 0.5
