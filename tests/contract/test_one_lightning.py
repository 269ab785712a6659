"""Modules written with `pytorch_lightning` train as those of `lightning`: the two names are one library.

Met in lightly, neuralforecast, darts and pytorch-tabular, whose modules import `pytorch_lightning`: Lightning ended
`Trainer.fit` with "Expected a parent" for every callback of this package.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memfit.one_lightning import _OtherName

ROOT = Path(__file__).parents[2]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A package `real_one` with a part and what it imports, which `other.one` stands for."""
    (tmp_path / "real_one").mkdir()
    (tmp_path / "real_one" / "__init__.py").write_text("from real_one.part import Class\n")
    (tmp_path / "real_one" / "part.py").write_text("class Class: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [_OtherName({"other.one": "real_one", "other": "real_one"}), *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("real_one", "other")]:
        del sys.modules[name]


def test_a_module_is_the_same_by_both_names(packages):
    part = importlib.import_module("other.one.part")
    assert part is importlib.import_module("real_one.part")
    assert (part.__name__, part.__spec__.name) == ("real_one.part", "real_one.part")
    assert importlib.import_module("other").Class is part.Class
    assert importlib.reload(part) is part


def test_what_neither_has_is_not_found(packages):
    with pytest.raises(ModuleNotFoundError, match="other.one.missing"):
        importlib.import_module("other.one.missing")
    assert importlib.util.find_spec("otherwise") is None


def test_to_ask_for_a_module_imports_no_package(packages):
    assert importlib.util.find_spec("other").origin == importlib.util.find_spec("real_one").origin
    assert "real_one" not in sys.modules


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.nightly
@pytest.mark.nightly_cases("first", "alone")
@pytest.mark.parametrize(
    ("order", "name"),
    [("later", "lightning.pytorch"), ("first", "pytorch_lightning"), ("alone", "pytorch_lightning")],
    ids=["later", "first", "alone"],
)
def test_techniques_strategies_and_traces_take_modules_of_either(tmp_path, order, name):
    ended = run("-m", "tests.helpers.one_lightning_run", order, str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1] == f"trained {name} 8"


@pytest.mark.nightly
def test_where_both_are_imported_before_a_warning_says_what_to_do():
    ended = run("-c", "import pytorch_lightning, lightning.pytorch, lightning_memfit")
    assert ended.returncode == 0
    assert "import lightning_memfit before the two" in ended.stderr
