import shutil
from pathlib import Path

import pytest

from lightning_memfit import AtomicCheckpointIO
from lightning_memfit.strategies.integrity import (
    FSDP2_MARK,
    ZERO_MARK,
    CheckpointError,
    last_good,
    replacing_folder,
    verify,
)


def save(path, content):
    with replacing_folder(path, ZERO_MARK) as folder:
        (folder / "latest").write_text("checkpoint")
        (folder / "weights").write_text(content)


def test_a_failed_save_leaves_the_former_one(tmp_path):
    save(tmp_path / "last.ckpt", "first")
    with (
        pytest.raises(CheckpointError, match="could not be written .disk full"),
        replacing_folder(tmp_path / "last.ckpt", ZERO_MARK),
    ):
        raise OSError("disk full")
    assert (tmp_path / "last.ckpt" / "weights").read_text() == "first"
    save(tmp_path / "last.ckpt", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "precious").mkdir()
    with pytest.raises(FileExistsError, match="not a checkpoint of this strategy"):
        save(tmp_path / "precious", "first")


class Killed(BaseException):
    """What `SIGKILL` does: nothing after it runs."""


def _killed_at(monkeypatch, moment):
    """End the run before the n-th change of the file system."""
    calls = iter(range(100))

    def counted(function):
        def call(*args, **kwargs):
            if next(calls) == moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    for owner, name in ((Path, "rename"), (Path, "mkdir"), (Path, "write_text"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("mark", [ZERO_MARK, FSDP2_MARK])
def test_whenever_the_run_dies_a_whole_checkpoint_is_there(tmp_path, mark):
    target = tmp_path / "last.ckpt"

    def write(content):
        with replacing_folder(target, mark) as folder:
            (folder / "weights").write_text(content)
            (folder / mark).write_text(content)

    write("0")
    died, before = 0, "0"
    for moment in range(10):
        before = (target / "weights").read_text() if target.exists() else before
        with pytest.MonkeyPatch.context() as patch:
            _killed_at(patch, moment)
            try:
                write(str(moment + 1))
            except Killed:
                died += 1
        found = target if target.exists() else last_good(target)  # between two renames, the former one is beside
        verify(found)
        assert (found / "weights").read_text() in (before, str(moment + 1))
    assert died >= 5
    write("last")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def save_file(path, content):
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "content": content}, path)


@pytest.mark.parametrize("write", [save_file, save])
@pytest.mark.parametrize("leads_to", ["good", "nothing"])
def test_a_link_in_a_checkpoints_place_is_replaced(write, leads_to, tmp_path):
    path, other, precious = tmp_path / "last.ckpt", tmp_path / "epoch=1.ckpt", tmp_path / "precious"
    if leads_to == "good":
        write(other, "1")
    path.symlink_to(other.name)
    precious.write_text("mine")
    (tmp_path / "last.ckpt.partial").symlink_to(precious)
    write(path, "2")
    assert not path.is_symlink()
    verify(path)
    assert other.exists() == (leads_to == "good")
    if other.exists():
        verify(other)
    assert precious.read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir() if "partial" in one.name or "former" in one.name] == []
    bad = tmp_path / "bad.ckpt"
    bad.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"bad.ckpt'` is empty.*The last good checkpoint there is '.*last.ckpt'"):
        verify(bad)
