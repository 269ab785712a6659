import json
import os
import warnings
from pathlib import Path

import pytest

from lightning_memfit.memory.cache_files import is_own, read_entry, tell_once, write_entry
from tests.helpers.small_drive import fill, small_drive


@pytest.fixture(autouse=True)
def nothing_told():
    tell_once.cache_clear()
    yield
    tell_once.cache_clear()


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "kept" / "entry.json"
    assert write_entry(path, {"sizes": [1, 2]})
    assert read_entry(path) == {"sizes": [1, 2]}
    assert [file.name for file in path.parent.iterdir()] == ["entry.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("12", "12000"),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: json.dumps({"sizes": [12]}),
        lambda text: json.dumps([1]),
    ],
)
def test_an_entry_that_was_changed_is_not_believed(tmp_path, change):
    path = tmp_path / "entry.json"
    write_entry(path, {"sizes": [12]})
    path.write_text(change(path.read_text()))
    with pytest.warns(UserWarning, match="entry.json is not used"):
        assert read_entry(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_entry(path) is None  # and is said once


def test_a_full_drive(tmp_path):
    with small_drive(tmp_path, 4) as drive:
        fill(drive)
        with pytest.warns(UserWarning, match="No space left on device"):
            assert not write_entry(drive / "entry.json", {"sizes": list(range(10_000))})
        assert sorted(file.name for file in drive.iterdir()) == ["filler", "lost+found"]


def test_a_read_only_drive(tmp_path):
    with small_drive(tmp_path, 4, "ro") as drive, pytest.warns(UserWarning, match="Read-only file system"):
        assert not write_entry(drive / "cache" / "entry.json", {})


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.warns(UserWarning, match=r"can't be kept in .*taken"):
        assert not write_entry(tmp_path / "taken" / "entry.json", {})
    assert read_entry(tmp_path / "taken" / "entry.json") is None
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_folder_in_which_others_may_write(tmp_path):
    path = tmp_path / "shared" / "entry.json"
    write_entry(path, {"sizes": [1]})
    path.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="everybody may write there"):
        assert read_entry(path) is None
    assert not write_entry(path, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user(tmp_path):
    """Seen by a process of a third one."""
    os.chown(tmp_path, 12345, 12345)
    tmp_path.chmod(0o755)
    process = os.fork()
    if process == 0:
        code = 2
        try:
            os.chdir(tmp_path)  # the folders above are root's alone
            os.seteuid(23456)
            warnings.simplefilter("ignore")
            code = int(is_own(Path()))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
