import pytest

from lightning_memfit.strategies.checkpoints import rewritten


def save(path, content):
    with rewritten(path, True, lambda: None) as folder:
        folder.mkdir()
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
        folder.mkdir()
        raise OSError("disk full")
    assert (tmp_path / "last.ckpt" / "weights").read_text() == "first"
    save(tmp_path / "last.ckpt", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "precious").mkdir()
    with pytest.raises(FileExistsError, match="not a DeepSpeed checkpoint"):
        save(tmp_path / "precious", "first")
