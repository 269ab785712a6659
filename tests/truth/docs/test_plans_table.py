import json

import pytest

from benchmarks.gpt2xl_from_plan import table as from_plan
from benchmarks.planner import pairs, pairs_table
from benchmarks.planner.models import SETS
from benchmarks.planner.table import RESULTS


def test_recorded_plans_keep_their_limits():
    for row in json.loads(RESULTS.read_text())["rows"]:
        plan = row["plan"]
        assert not plan["fits"] or plan["needed_bytes"] <= plan["usable_bytes"]
        devices = plan["setting"]["world_size"] if plan["fits"] else 1
        for limit, tiers in (("host_gib", ("host", "pinned_host")), ("disk_gib", ("disk",))):
            each = sum(sum(plan["breakdown"].get(tier, {}).values()) for tier in tiers)
            assert devices * each <= row[limit] << 30


def test_gpt2_xl_trains_from_the_plan_alone_within_12_gib():
    result = json.loads(from_plan.RESULT.read_text())
    assert result["limit_bytes"] == 12 << 30
    assert result["within_the_limit"]
    assert len(result["optimizer_steps"]) == 2
    assert len(result["probes"]) == 1
    assert abs(result["predicted_bytes"] / result["measured_bytes"] - 1) < 0.05


def pairs_of(name):
    file = pairs.RESULTS / SETS[name].file
    return [pair for model in json.loads(file.read_text())["models"] for pair in model["pairs"]]


@pytest.mark.parametrize("name", SETS)
def test_every_plan_fits_and_refusals_are_right(name):
    pairs = pairs_of(name)
    assert sum("setting" in pair for pair in pairs) >= 0.75 * len(pairs)
    assert all(pair["fits"] if "setting" in pair else not pair["num_fitting"] for pair in pairs)


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
    assert pairs_table._exactness([{"seconds": 1.0, **recorded}]).startswith(told)
