import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_memfit.memory.cache_files import sealed
from lightning_memfit.planner.lock import PlanLock, imported_user_files, paths_in, plan_key


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("trainer: {}\n")
    return path


def test_same_question_same_plan(tmp_path: Path, recipe: Path) -> None:
    lock = PlanLock(tmp_path / "folder" / "plan.lock")
    key = plan_key([recipe], ["--a=1"], "RTX 3060", {"allow": None})
    assert lock.load(key) == (None, [])
    lock.save(key, {"fits": True}, [])
    assert lock.load(plan_key([recipe], ["--a=1"], "RTX 3060", {"allow": None})) == ({"fits": True}, [])


def test_what_changed_is_named(tmp_path: Path, recipe: Path) -> None:
    lock, data = PlanLock(tmp_path / "plan.lock"), tmp_path / "data.txt"
    data.write_text("x")
    lock.save(plan_key([recipe], [], "RTX 3060", {}), {}, [data, tmp_path / "absent"])
    assert lock.load(plan_key([recipe], [], "RTX 3090", {}))[1] == ["device"]
    assert lock.load(plan_key([recipe], ["--x=1"], "RTX 3060", {"allow": "exact"}))[1] == ["limits", "overrides"]
    data.write_text("longer")
    assert lock.load(plan_key([recipe], [], "RTX 3060", {}))[1] == [str(data)]
    recipe.write_text("trainer: {max_steps: 1}\n")
    assert "recipe" in lock.load(plan_key([recipe], [], "RTX 3060", {}))[1]


def test_versions_are_part_of_the_key(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_key([recipe], [], "T4", {})
    monkeypatch.setattr("lightning_memfit.planner.lock.version", lambda name: "0")
    assert before.differences(plan_key([recipe], [], "T4", {}).parts) == ["versions"]
    assert before.digest != plan_key([recipe], [], "T4", {}).digest


def test_another_file_is_refused(tmp_path: Path, recipe: Path) -> None:
    path = tmp_path / "plan.lock"
    for text in ("not json", "{}", json.dumps([1])):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"--lock.*no lock file"):
            PlanLock(path).load(plan_key([recipe], [], "T4", {}))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"fits": true', '"fits": false'),
        lambda text: text.replace('"plan"', '"plans"'),
        lambda text: text.replace('"files": {}', '"files": []'),
        lambda text: text[:-20],
        lambda text: "[" * 100_000,
        lambda text: json.dumps(sealed({"key": {}, "files": [], "plan": 3})),
    ],
)
def test_a_lock_edited_by_hand_is_refused(tmp_path: Path, recipe: Path, change: Callable[[str], str]) -> None:
    path, key = tmp_path / "plan.lock", plan_key([recipe], [], "T4", {})
    PlanLock(path).save(key, {"fits": True}, [])
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=r"--lock.*no lock file.*delete it to plan anew"):
        PlanLock(path).load(key)


def test_files_that_a_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x")
    config = {"data": {"init_args": {"dataset": str(tmp_path / "text.txt"), "n": 1}}, "list": [str(tmp_path), "a/b"]}
    assert paths_in(config) == [(tmp_path / "text.txt").resolve(), tmp_path.resolve()]


def test_own_modules_of_the_user_are_found() -> None:
    assert Path(__file__).resolve() in imported_user_files()
    assert not any("site-packages" in str(path) for path in imported_user_files())


def test_reading_a_lock_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_memfit.planner.lock; print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
