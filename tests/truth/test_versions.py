"""What `make test-versions` runs is what `pyproject.toml` claims."""

import sys

import pytest

from tests import versions
from tests.upstream_names import VERSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]
KEY = ("torch", "lightning", "transformers")


def test_the_oldest_environment_has_the_lower_bounds_and_the_oldest_python():
    oldest = versions.ENVIRONMENTS["oldest"]
    assert PROJECT["requires-python"] == f">={oldest.python}"
    for name in KEY:
        assert any(line.startswith(f"{name}>={oldest.pins[name]},<") for line in PROJECT["dependencies"])


def test_every_environment_pins_what_decides():
    for environment in versions.ENVIRONMENTS.values():
        assert set(KEY) <= set(environment.pins)


def test_each_python_of_the_classifiers_is_run():
    claimed = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    own = "3.11"  # that of `make test`
    assert claimed <= {environment.python for environment in versions.ENVIRONMENTS.values()} | {own}


def test_the_page_of_private_names_says_the_same_versions_of_torch():
    ends = [versions.ENVIRONMENTS[name].pins["torch"].split(".") for name in ("oldest", "newest")]
    assert VERSIONS["torch"] == "-".join(f"{major}.{minor}" for major, minor, *_ in ends)


@pytest.mark.parametrize(("outcome", "status"), [("passed: 3 passed", 0), ("FAILED: 1 failed", 1), ("not run", 0)])
def test_the_table_names_each_environment_and_fails_with_one(monkeypatch, tmp_path, capsys, outcome, status):
    monkeypatch.setattr(versions, "FOLDER", tmp_path / "environments")
    monkeypatch.setattr(versions, "run", lambda name, arguments: outcome if name == "oldest" else "passed: 3 passed")
    assert versions.main([]) == status
    table = capsys.readouterr().out.rpartition("environment")[2]
    assert all(name in table for name in versions.ENVIRONMENTS)
    assert outcome in table


def test_a_python_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(versions, "interpreter", lambda version: None)
    assert versions.run("oldest", []) == "not run: no python3.10 here"
