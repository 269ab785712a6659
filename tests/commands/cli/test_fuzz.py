"""A sample of the mutated recipes and command lines of `tests/fuzz.py`, which has 300 (`make fuzz`)."""

import pytest
import yaml

from tests.fuzz import RECIPE, Case, make_case, run_case

SAMPLE = range(0, 300, 24)


@pytest.mark.parametrize("number", SAMPLE)
def test_mutated_input_ends_in_one_message(number, tmp_path):
    case = run_case(make_case(number), tmp_path)
    assert case.broken == [], " ".join(case.arguments)


@pytest.mark.parametrize("command", ["fit", "validate", "test", "estimate"])
def test_the_recipe_itself_is_right(command, tmp_path):
    """Or else every mutation of it would end in the same message."""
    case = run_case(Case(0, yaml.safe_dump(RECIPE).encode(), [command, "--config=CONFIG"]), tmp_path)
    assert case.broken == []
    assert case.code == 0


def test_a_number_gives_the_same_case_everywhere():
    first, again = make_case(17), make_case(17)
    assert (first.content, first.arguments) == (again.content, again.arguments)
