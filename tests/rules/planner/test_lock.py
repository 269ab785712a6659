import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_memfit.memory.cache_files import sealed
from lightning_memfit.planner import lock as lock_module
from lightning_memfit.planner.lock import (
    PlanLock,
    Sources,
    imported_user_modules,
    names_in,
    plan_key,
    source_of,
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("trainer: {}\n")
    return path


def test_same_question_same_plan(tmp_path: Path, recipe: Path) -> None:
    lock = PlanLock(tmp_path / "folder" / "plan.lock")
    key = plan_key([recipe], ["--a=1"], "RTX 3060", {"allow": None})
    assert lock.load(key) == (None, [])
    lock.save(key, {"fits": True}, Sources())
    assert lock.load(plan_key([recipe], ["--a=1"], "RTX 3060", {"allow": None})) == ({"fits": True}, [])


def test_what_changed_is_named(tmp_path: Path, recipe: Path) -> None:
    lock, data = PlanLock(tmp_path / "plan.lock"), tmp_path / "data.txt"
    data.write_text("x")
    lock.save(plan_key([recipe], [], "RTX 3060", {}), {}, Sources.now([str(data), str(tmp_path / "absent")]))
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


def test_a_file_that_was_not_there_counts(tmp_path: Path, recipe: Path) -> None:
    lock, key, data = PlanLock(tmp_path / "plan.lock"), plan_key([recipe], [], "T4", {}), tmp_path / "rates.json"
    lock.save(key, {}, Sources.now([str(data)]))
    assert lock.load(key) == ({}, [])
    data.write_text("three times slower")
    assert lock.load(key) == (None, [str(data)])


@pytest.mark.parametrize(
    ("fits", "now", "changed"),
    [(True, 60, False), (True, 41, False), (True, 39, True), (True, 90, True), (False, 40, False), (False, 61, True)],
)
def test_free_host_memory_counts(tmp_path: Path, recipe: Path, fits: bool, now: int, changed: bool) -> None:
    """It differs from minute to minute: a plan counts as long as it fits, and no much better one may exist."""
    lock, key = PlanLock(tmp_path / "plan.lock"), plan_key([recipe], [], "T4", {})
    breakdown = {"device": {"parameter": 99}, "host": {"gradient": 5}, "pinned_host": {"optimizer_state": 15}}
    plan = {"fits": fits, "breakdown": breakdown, "setting": {"world_size": 2, "techniques": {}} if fits else None}
    lock.save(key, plan, Sources(), free_bytes=60)
    assert lock.load(key, now)[1] == (["free host memory"] if changed else [])
    assert lock.load(key) == (plan, [])


def test_ranks_of_a_machine_share_its_host_memory(tmp_path: Path, recipe: Path) -> None:
    lock, key = PlanLock(tmp_path / "plan.lock"), plan_key([recipe], [], "T4", {})
    setting = {"world_size": 8, "techniques": {"fsdp2": {"num_nodes": 4}, "bf16_mixed": {}}}
    lock.save(
        key, {"fits": True, "breakdown": {"host": {"gradient": 20}}, "setting": setting}, Sources(), free_bytes=60
    )
    assert lock.load(key, 41)[1] == []
    assert lock.load(key, 39)[1] == ["free host memory"]


def test_all_files_of_a_folder_count(tmp_path: Path) -> None:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "a.txt").write_text("x")
    sources = Sources.now([str(tmp_path / "texts")])
    assert sources.changed() == []
    (tmp_path / "texts" / "deep" / "b.txt").write_text("x")
    assert sources.changed() == [str(tmp_path / "texts")]


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two folders with modules of one name and other content; the first is imported, the second one's turn comes."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for width, folder in enumerate(folders):
        (folder / "tagger_of_a_test").mkdir(parents=True)
        (folder / "tagger_of_a_test" / "__init__.py").write_text("raise SystemExit('a lock runs no code')\n" * width)
        (folder / "tagger_of_a_test" / "net.py").write_text(f"WIDTH = {width}\n")
        (folder / "data.txt").write_text("x" * width)
    monkeypatch.setattr(sys, "path", [str(folders[0]), *sys.path])
    importlib.import_module("tagger_of_a_test.net")
    yield folders
    for name in ("tagger_of_a_test.net", "tagger_of_a_test"):
        sys.modules.pop(name, None)


def test_a_plan_of_another_folder_does_not_count(
    projects: list[Path], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git worktrees, copies of a project, and a lock that was copied: equal recipes over other modules and data."""
    monkeypatch.chdir(projects[0])
    lock, key = PlanLock(projects[0] / "plan.lock"), plan_key([recipe], [], "T4", {})
    lock.save(key, {"fits": True}, Sources.now(["./data.txt"]))
    assert lock.load(key) == ({"fits": True}, [])
    monkeypatch.setattr(sys, "path", [str(projects[1]), *sys.path[1:]])
    monkeypatch.chdir(projects[1])
    changed = lock.load(key)[1]
    assert changed == ["tagger_of_a_test", "tagger_of_a_test.net", "./data.txt"]


def test_a_module_that_was_loaded_from_a_file_counts_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "loaded.py"
    path.write_text("WIDTH = 1\n")
    spec = importlib.util.spec_from_file_location("module_without_a_finder", path)
    sys.modules["module_without_a_finder"] = importlib.util.module_from_spec(spec)
    try:
        sources = Sources.now()
    finally:
        del sys.modules["module_without_a_finder"]
    assert str(path.resolve()) in sources.files
    path.write_text("WIDTH = 12\n")
    assert sources.changed() == [str(path.resolve())]


def test_sources_of_modules() -> None:
    assert source_of(__name__) == Path(__file__).resolve()
    assert source_of("tests.absent.module") is None
    assert source_of("tests.conftest.more") is None
    assert source_of("sys") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"fits": true', '"fits": false'),
        lambda text: text.replace('"plan"', '"plans"'),
        lambda text: text.replace('"files": {}', '"files": []'),
        lambda text: text[:-20],
        lambda text: "[" * 100_000,
        lambda text: json.dumps(sealed({"key": {}, "made_from": {}, "free_bytes": None, "plan": 3})),
    ],
)
def test_a_lock_edited_by_hand_is_refused(tmp_path: Path, recipe: Path, change: Callable[[str], str]) -> None:
    path, key = tmp_path / "plan.lock", plan_key([recipe], [], "T4", {})
    PlanLock(path).save(key, {"fits": True}, Sources())
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=r"--lock.*no lock file.*delete it to plan anew"):
        PlanLock(path).load(key)


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Sources]:
    """What a plan was made from whose only module of the user's has some code."""
    monkeypatch.delenv("WIDTH", raising=False)

    def made(code: str) -> Sources:
        path = tmp_path / f"asking_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"import os\n{code}\n")
        monkeypatch.setattr(lock_module, "imported_user_modules", lambda: {path.stem: path})
        return Sources.now()

    return made


def test_variables_that_the_users_modules_ask_for_count(
    asking: Callable[[str], Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = asking("width = os.environ.get('WIDTH')")
    monkeypatch.setenv("DEPTH", "2")
    assert one.changed() == []
    monkeypatch.setenv("WIDTH", "a secret")
    assert one.changed() == ["$WIDTH"]
    assert "a secret" not in str(asking("width = os.environ.get('WIDTH')"))


def test_variables_that_modules_set_are_as_they_were_before(
    asking: Callable[[str], Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(os.environ)
    asking("os.environ.setdefault('WIDTH', '2')")
    monkeypatch.setenv("WIDTH", "2")
    sources = Sources.now(environment=environment)
    monkeypatch.delenv("WIDTH")
    assert sources.changed() == []


def test_variables_that_this_package_asks_for_count(
    asking: Callable[[str], Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = asking("")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert sources.changed() == ["$CUBLAS_WORKSPACE_CONFIG"]


_DECIDE_NOTHING = {
    "TMPDIR",  # which processes that trace are given
    "TORCHINDUCTOR_CACHE_DIR",
    "MEMFIT_CACHE",  # where caches are
    "XDG_CACHE_HOME",
    "MEMFIT_NVME_PATH",  # an option of the command
    "LOCAL_WORLD_SIZE",  # of a run
    "TORCH_EXTENSIONS_DIR",
    "HF_HUB_OFFLINE",  # where and how a model is looked up by its name
    "HF_ENDPOINT",
}
_ASKED = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()"([A-Z_]+)\"""")


def test_every_variable_that_this_package_asks_for_is_known() -> None:
    """One that decides what a plan says belongs into the key of plans (`_VARIABLES`); others are named here."""
    root = Path(lock_module.__file__).parents[1]
    asked = {
        name
        for path in root.rglob("*.py")
        if not path.relative_to(root).as_posix().startswith(("bench/", "cli/"))
        for name in _ASKED.findall(path.read_text(encoding="utf-8"))
    }
    assert "MEMFIT_CACHE" in asked
    assert asked - {*lock_module._VARIABLES} <= _DECIDE_NOTHING


def test_a_small_file_counts_by_its_content(tmp_path: Path) -> None:
    """As git writes it anew with every clone."""
    path = tmp_path / "model.yaml"
    path.write_text("width: 1")
    sources = Sources.now([str(path)])
    os.utime(path, (1, 1))
    assert sources.changed() == []
    path.write_text("width: 2")
    assert sources.changed() == [str(path)]


def test_files_that_a_configuration_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("x")
    config = {
        "data": {"init_args": {"dataset": "text.txt", "n": 1}},
        "list": [str(tmp_path), "a/b", "plain", "", "\0", 1000 * "x"],
    }
    assert names_in(config) == ["text.txt", str(tmp_path), "a/b"]


def test_own_modules_of_the_user_are_found() -> None:
    assert imported_user_modules()[__name__] == Path(__file__).resolve()
    assert not any("site-packages" in str(path) for path in imported_user_modules().values())


def test_reading_a_lock_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_memfit.planner.lock; print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
