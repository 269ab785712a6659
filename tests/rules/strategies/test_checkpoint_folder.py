import shutil
from pathlib import Path

import pytest

from lightning_memfit.strategies import checkpoints
from lightning_memfit.strategies.checkpoints import rewritten


def save(path, content):
    with rewritten(path, True, lambda: None) as folder:
        folder.mkdir(exist_ok=True)
        (folder / "latest").write_text("checkpoint")
        (folder / "weights").write_text(content)


def test_a_second_save_replaces_the_first(tmp_path):
    for content in ("first", "second"):
        save(tmp_path / "last.ckpt", content)
    assert (tmp_path / "last.ckpt" / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_failed_save_leaves_the_former_one(tmp_path):
    save(tmp_path / "last.ckpt", "first")
    with pytest.raises(OSError, match="disk full"), rewritten(tmp_path / "last.ckpt", True, lambda: None) as folder:
        folder.mkdir(exist_ok=True)
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
    monkeypatch.setattr(checkpoints, "_exchanged", counted(checkpoints._exchanged))


@pytest.mark.parametrize("mark", [checkpoints.ZERO_MARK, checkpoints.FSDP2_MARK])
def test_whenever_the_run_dies_a_whole_checkpoint_is_there(tmp_path, mark):
    target = tmp_path / "last.ckpt"

    def write(content):
        with rewritten(target, True, lambda: None, mark) as folder:
            folder.mkdir(exist_ok=True)
            (folder / "weights").write_text(content)
            (folder / mark).write_text(content)

    write("0")
    died = 0
    for moment in range(10):
        before = (target / "weights").read_text()
        with pytest.MonkeyPatch.context() as patch:
            _killed_at(patch, moment)
            try:
                write(str(moment + 1))
            except Killed:
                died += 1
        assert (target / "weights").read_text() == (target / mark).read_text()
        assert (target / "weights").read_text() in (before, str(moment + 1))
    assert died >= 5
    write("last")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_without_a_call_that_exchanges_the_former_one_is_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_exchanged", lambda one, other: False)
    for content in ("first", "second"):
        save(tmp_path / "last.ckpt", content)
    assert (tmp_path / "last.ckpt" / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
