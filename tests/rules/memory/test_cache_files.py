import warnings

import pytest

from lightning_memfit.memory.cache_files import read_entry, tell_once, write_entry
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


@pytest.mark.parametrize("text", ["", '{"sizes": [1', "[" * 100_000])
def test_an_entry_that_is_damaged_is_said_once(tmp_path, text):
    path = tmp_path / "entry.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="entry.json can't be read"):
        assert read_entry(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_entry(path) is None


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
