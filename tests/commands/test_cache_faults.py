"""Commands with a cache folder that is full, can't be written or is a file: they warn once and answer the same."""

import json
from pathlib import Path

import pytest
import yaml

import cli.estimate_recipe
import cli.plan_recipe  # noqa: F401  Lightning's log handler must not hold the stderr of one test
from cli.main import main
from lightning_memfit.memory.cache_files import tell_once
from tests.fuzz import RECIPE
from tests.helpers.small_drive import fill, small_drive


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    recipe = {**RECIPE, "trainer": {**RECIPE["trainer"], "callbacks": None, "logger": False}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def estimate(cache: Path) -> int:
        monkeypatch.setenv("MEMFIT_CACHE", str(cache))
        tell_once.cache_clear()
        assert main(["estimate", "--config", str(tmp_path / "recipe.yaml"), "--device", "1GiB", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["verdict"]["needed_bytes"]

    return estimate


@pytest.mark.nightly
def test_a_cache_that_can_not_be_written(ask, tmp_path):
    true = ask(tmp_path / "cache")
    (tmp_path / "taken").write_text("mine")
    with pytest.warns(UserWarning, match=r"can't be kept in .*taken"):
        assert ask(tmp_path / "taken") == true
    with small_drive(tmp_path, 4) as drive:
        fill(drive)
        with pytest.warns(UserWarning, match="No space left on device"):
            assert ask(drive / "cache") == true


def test_a_read_only_cache(ask, tmp_path):
    with small_drive(tmp_path, 4, "ro") as drive, pytest.warns(UserWarning, match="Read-only file system"):
        assert ask(drive / "cache") > 0
