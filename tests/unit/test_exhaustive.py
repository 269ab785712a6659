import pytest

from tests.conftest import EXHAUSTIVE, INTEGRATION


@pytest.mark.parametrize("line", EXHAUSTIVE)
def test_every_line_names_a_test(line):
    file, name = line.split("::")
    assert f"\ndef {name.partition('[')[0]}" in (INTEGRATION.parents[1] / file).read_text()


def test_no_line_begins_another():
    assert not [line for line in EXHAUSTIVE for other in EXHAUSTIVE if line != other and line.startswith(other)]
