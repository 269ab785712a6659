"""The counter of step costs counts what a step does, and its page says what its results say."""

from typing import Any

import pytest

from benchmarks.bench_pages import UNEXPLAINED, reason, rows_with_reasons
from benchmarks.step_cost.count import Cost
from benchmarks.step_cost.rows import ROWS, Row, Side
from benchmarks.step_cost.run import MOST, measure, ratio

pytestmark = pytest.mark.own_process


@pytest.fixture(scope="module")
def plain() -> Cost:
    Side("warm-up").cost()
    return Side("plain").cost()


def _reading(model: Any) -> None:
    """Read a value of the device in every step, as a user's module may."""

    def read(module: Any, args: Any, output: Any) -> None:
        output.loss.item()

    model.register_forward_hook(read)


def test_a_plain_step_costs_the_same_each_time(plain: Cost) -> None:
    again = Side("plain").cost()
    assert (again.calls, again.operators, again.reads) == (plain.calls, plain.operators, plain.reads)
    assert plain.operators > 12 * 20
    assert 0 < plain.milliseconds < 1000


def test_a_planted_read_is_counted(plain: Cost) -> None:
    read = Side("reading", change=_reading).cost()
    assert read.reads["_local_scalar_dense"] == plain.reads["_local_scalar_dense"] + 1
    assert read.operators == plain.operators + 1
    assert plain.calls < read.calls < plain.calls + 10, "the hook's own"


def test_the_whole_step_of_several_batches_is_counted(plain: Cost) -> None:
    """Four forward and backward passes, and one step of the optimizer."""
    four = Side("four", trainer={"accumulate_grad_batches": 4}).cost()
    assert 2 * plain.operators < four.operators < 4 * plain.operators


def test_rows_have_both_sides() -> None:
    chosen = [row for row in ROWS if row.name in ("checkpointing, every=2", "DataWaitMonitor")]
    checkpointed, monitored = map(measure, chosen)
    assert checkpointed["sides"][0]["operators"] <= checkpointed["sides"][1]["operators"]
    assert 1 < (ratio(*monitored["sides"]) or 0) < MOST
    broken = measure(Row("broken", Side("ours", trainer={"precision": "no"}), ()))
    assert "precision" in broken["sides"][0]["failed"].lower()


def test_reasons_are_those_of_rows_that_exist() -> None:
    assert rows_with_reasons("step_cost") <= {row.name for row in ROWS}
    assert reason("step_cost", "no such row") == UNEXPLAINED
