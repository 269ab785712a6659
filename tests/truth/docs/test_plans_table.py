import pytest

from benchmarks.planner import pairs
from benchmarks.planner.gpt2xl_plans import RESULT
from benchmarks.runner import read


def test_recorded_plans_keep_their_limits():
    for row in read(RESULT)["rows"]:
        plan = row["plan"]
        assert not plan["fits"] or plan["needed_bytes"] <= plan["usable_bytes"]
        devices = plan["setting"]["world_size"] if plan["fits"] else 1
        for limit, tiers in (("host_gib", ("host", "pinned_host")), ("disk_gib", ("disk",))):
            each = sum(sum(plan["breakdown"].get(tier, {}).values()) for tier in tiers)
            assert devices * each <= row[limit] << 30


def test_every_plan_fits_and_refusals_are_right():
    tried = [pair for model in read(pairs.RESULT)["rows"] for pair in model["pairs"]]
    assert sum("setting" in pair for pair in tried) >= 0.75 * len(tried)
    assert all(pair["fits"] if "setting" in pair else not pair["num_fitting"] for pair in tried)


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"exact": True}, "1 of 1 plans keep the recipe's numbers; for 0 of the other 0"),
        ({"exact": False, "best_exact_s": None}, "0 of 1 plans keep the recipe's numbers; for 1 of the other 1"),
        ({"exact": False, "best_exact_s": 1.04}, "0 of 1 plans keep the recipe's numbers; for 0 of the other 1"),
        ({"exact": False, "best_exact_s": 1.06}, "0 of 1 plans keep the recipe's numbers; for 1 of the other 1"),
    ],
)
def test_whether_numbers_had_to_change_is_told_from_what_was_measured(recorded, told):
    assert pairs.exactness([{"seconds": 1.0, **recorded}]).startswith(told)
