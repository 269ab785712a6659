import json

from benchmarks.gpt2xl_from_plan import table as from_plan
from benchmarks.marks import insert
from benchmarks.planner import pairs_table
from benchmarks.planner.table import MARK, PAGE, RESULTS, render


def test_the_guide_shows_the_recorded_plans():
    page = PAGE.read_text()
    assert insert(page, MARK, render(json.loads(RESULTS.read_text()))) == page


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
    assert from_plan.PAGE.read_text() == from_plan.page(), "run `python -m benchmarks.gpt2xl_from_plan.table`"
    assert result["limit_bytes"] == 12 << 30
    assert result["within_the_limit"]
    assert len(result["optimizer_steps"]) == 2
    assert len(result["probes"]) == 1
    assert abs(result["predicted_bytes"] / result["measured_bytes"] - 1) < 0.05


def test_the_guide_shows_how_good_plans_are():
    document = json.loads(pairs_table.RESULTS.read_text())
    page = pairs_table.PAGE.read_text()
    assert insert(page, pairs_table.MARK, pairs_table.render(document)) == page, "run `... planner.pairs_table`"
    pairs = [pair for model in document["models"] for pair in model["pairs"]]
    assert sum("setting" in pair for pair in pairs) >= 20
    assert all(pair["fits"] if "setting" in pair else not pair["num_fitting"] for pair in pairs)
