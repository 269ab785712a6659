"""The package stays within the ceilings of tests/budget.json."""

import warnings

from tests import budget


def test_no_number_is_above_its_ceiling() -> None:
    numbers = budget.measure()
    ceilings, _ = budget.read_table()
    over = budget.above(numbers, ceilings)
    assert not over, "make it smaller; raising a ceiling is a commit of its own that says why:\n" + "\n".join(over)
    for line in budget.below(numbers, ceilings):
        warnings.warn(f"{line} (`python -m tests.budget --write`)", stacklevel=1)


def test_every_target_has_a_ceiling_above_it() -> None:
    ceilings, targets = map(budget.flatten, budget.read_table())
    assert set(targets) <= set(ceilings)


def test_ceilings_only_fall_and_what_is_above_or_can_fall_is_named() -> None:
    numbers, ceilings = {"lines": {"cli": 12, "data": 90, "new": 1}}, {"lines": {"cli": 10, "data": 100, "bench": 5}}
    assert budget.above(numbers, ceilings) == [
        "lines: cli is 12, 2 above its ceiling of 10",
        "lines: new is 1 and has no ceiling: add one to tests/budget.json",
    ]
    assert budget.below(numbers, ceilings) == [
        "lines: data: lower the ceiling of 100 to 90",
        "lines: bench is gone: remove its ceiling",
    ]
    assert budget.lowered(numbers, ceilings) == {"lines": {"cli": 10, "data": 90}}


def test_tokens_leave_out_comments_line_ends_and_indentation() -> None:
    source = 'def half(number):\n    """Of a number."""\n\n    return f"{number / 2}"  # not 3\n'
    counted = ["def", "half", "(", "number", ")", ":", '"""Of a number."""', "return", 'f"{number / 2}"']
    assert budget.count_tokens(source) == len(counted)
