import json

from benchmarks.marks import insert
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
