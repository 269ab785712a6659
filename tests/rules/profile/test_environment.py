"""Environment variables that code asks for."""

import pytest

from lightning_memfit.profile.environment import variables_in


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import os\nos.environ['A'] + os.environ.get('B', '') + os.getenv('C')", {"A", "B", "C"}),
        ("from os import environ, getenv\nenviron.get('A'), getenv('B'), 'C' in environ", {"A", "B", "C"}),
        ("NAME = 'A'\ndef f(): return os.environ.get(NAME)", {"A"}),
        ("os.environ['A'] = '1'\ndel os.environ['B']", set()),
        ("settings.get('A')", set()),
        ("os.environ.setdefault('A', '1')", {"A"}),
        ("NAME = 'A'\nNAME = 'B'\nos.environ.get(NAME)", None),
        ("NAME = 'A'\ndef f(NAME): return os.environ.get(NAME)", None),
        ("os.environ.get(f'{prefix}_A')", None),
        ("dict(os.environ)", None),
        ("{**os.environ}", None),
        ("read = os.getenv", None),
        ("from os import environ as variables\nvariables['A']", None),
        ("no Python, os.environ", None),
        ("no words of that, and no Python", set()),
        ("os.\N{MATHEMATICAL BOLD SCRIPT SMALL E}nviron['A']", {"A"}),
    ],
)
def test_variables_of_a_source(code, names):
    assert variables_in(code) == names
