"""A sample of the mutated recipes and command lines of `tests/fuzz.py`, which has 300 (`make fuzz`)."""

import pytest

from tests.fuzz import make_case, run_case

SAMPLE = range(0, 300, 8)


@pytest.mark.slow
@pytest.mark.parametrize("number", SAMPLE)
def test_mutated_input_ends_in_one_message(number, tmp_path):
    case = run_case(make_case(number), tmp_path)
    assert case.broken == [], " ".join(case.arguments)


def test_a_number_gives_the_same_case_everywhere():
    first, again = make_case(17), make_case(17)
    assert (first.content, first.arguments) == (again.content, again.arguments)
