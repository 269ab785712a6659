"""The page of `memfit plan --html`: its settings are those of the search at every limit, and its text is escaped."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from lightning_memfit.planner import make as module
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.plan import Plan
from lightning_memfit.planner.plan_page import render_plan
from lightning_memfit.planner.tried import Explored, tried_of

from .made import MadeTraceStore, made_workload

PAYLOAD = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


@cache
def explored(usable_mib: int) -> tuple[Plan, Explored, list[Any]]:
    stores = []

    def made(workload: Any, *_: Any) -> MadeTraceStore:
        stores.append(MadeTraceStore(workload))
        return stores[0]

    found: list[Explored] = []
    asked = []

    def observe(search: Any, outcome: Any, plan: Plan) -> None:
        before = set(stores[0].asked)
        found.append(tried_of(search, outcome, plan))
        asked.extend(set(stores[0].asked) - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TraceStore", made)
        plan = make_plan(made_workload(usable_mib), observe=observe)
    return plan, found[0], asked


def page_of(plan: Plan, found: Explored) -> str:
    return render_plan(plan.to_dict(), found, [PAYLOAD] * len(found.tried))


def data_in(page: str) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_nothing_is_traced_and_the_plan_is_one_dot_with_its_own_figures() -> None:
    plan, found, asked = explored(1200)
    assert asked == []
    data = data_in(page_of(plan, found))
    assert data["plan"] == json.loads(json.dumps(plan.to_dict()))
    (dot,) = [dot for dot in data["tried"] if dot["is_plan"]]
    for name in ("label", "needed_bytes", "peak_bytes", "seconds_per_step", "breakdown", "changes"):
        assert dot[name] == data["plan"][name]
    assert dot["from"] <= found.planned


def test_a_plan_for_another_limit_is_no_slower_than_the_best_dot_there() -> None:
    _, found, _ = explored(1200)
    compared = 0
    for limit in found.limits[1::4]:
        fitting = [one for one in found.tried if one.plan.needed_bytes <= limit.usable_bytes]
        if not fitting:
            continue
        cost = min(one.plan.seconds_per_step * one.weight for one in fitting)
        there, other, _ = explored(limit.capacity_bytes >> 20)
        mine = next(one for one in other.tried if one.plan.setting == there.setting)
        assert mine.plan.seconds_per_step * mine.weight <= cost * (1 + found.tie)
        compared += 1
    assert compared


def test_nothing_fits() -> None:
    plan, found, _ = explored(250)
    data = data_in(page_of(plan, found))
    assert not plan.fits
    assert not any(dot["is_plan"] for dot in data["tried"])


def test_names_are_escaped_and_nothing_is_loaded() -> None:
    plan, found, _ = explored(1200)
    page = page_of(replace(plan, model=PAYLOAD, device=PAYLOAD), found)
    assert PAYLOAD not in page
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|<link|@import|url\(", page)
    assert data_in(page)["tried"][0]["yaml"] == PAYLOAD
