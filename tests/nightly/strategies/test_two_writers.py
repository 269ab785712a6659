"""Two runs that write one checkpoint, links in its place, and a rank that fails while the others wait."""

import errno
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_memfit import AtomicCheckpointIO
from lightning_memfit.strategies import integrity
from lightning_memfit.strategies.checkpoints import rewritten
from lightning_memfit.strategies.integrity import CheckpointError, verify
from tests.helpers.ranks import run_ranks

SECONDS = 4.0


def contents(value):
    return {"state_dict": {"weight": torch.full((100_000,), float(value))}, "epoch": value}


def write_file(path, value):
    AtomicCheckpointIO().save_checkpoint(contents(value), path)


def write_folder(path, value):
    with rewritten(path, True, lambda: None) as folder:
        for number in range(4):
            (folder / f"shard-{number}").write_bytes(bytes([value]) * 20_000)
        (folder / "latest").write_text("checkpoint")


def keeps_writing(write, path, value):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        write(path, value)


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_two_runs_that_write_one_checkpoint(write, tmp_path):
    """What is there is whole at any moment, of one of them, and neither fails."""
    path = tmp_path / "last.ckpt"
    write(path, 1)
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=keeps_writing, args=(write, path, value)) for value in (1, 2)]
    for run in runs:
        run.start()
    while any(run.is_alive() for run in runs):
        if write is write_file:
            values = AtomicCheckpointIO(verify=False).load_checkpoint(path)["state_dict"]["weight"].unique()
            assert values.tolist() in ([1.0], [2.0])
        time.sleep(0.01)
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0]
    verify(path)
    if write is write_folder:
        assert len({(path / f"shard-{number}").read_bytes() for number in range(4)}) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_what_another_run_is_writing_is_left_alone(write, tmp_path):
    from lightning_memfit.strategies.integrity import partial_of

    path, is_folder = tmp_path / "last.ckpt", write is write_folder
    with partial_of(path, is_folder) as (other, _):  # locks of one process are told apart, too
        own = other / "shard" if is_folder else other
        own.write_text("half")
        write(path, 1)
        assert own.read_text() == "half"
        assert not (tmp_path / "last.ckpt.2.partial").exists()
    write(path, 2)
    verify(path)
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_once(number, tmp_path, monkeypatch, recwarn):
    """As NFS and Lustre answer where they are mounted without locks."""

    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    integrity._tell_without_locks.cache_clear()
    monkeypatch.setattr("fcntl.flock", refuse)
    for value, write in enumerate((write_file, write_folder, write_file)):
        write(tmp_path / f"{value}.ckpt", value)
        verify(tmp_path / f"{value}.ckpt")
    told = [str(one.message) for one in recwarn if "has no locks" in str(one.message)]
    assert len(told) == 1
    assert os.strerror(number) in told[0]
    integrity._tell_without_locks.cache_clear()


@pytest.mark.parametrize("write", [write_file, write_folder])
@pytest.mark.parametrize("leads_to", ["good", "nothing"])
def test_a_link_in_a_checkpoints_place_is_replaced(write, leads_to, tmp_path):
    path, other = tmp_path / "last.ckpt", tmp_path / "epoch=1.ckpt"
    if leads_to == "good":
        write(other, 1)
    path.symlink_to(other.name)
    (tmp_path / "gone.ckpt").symlink_to("nowhere")
    write(path, 2)
    assert not path.is_symlink()
    verify(path)
    assert other.exists() == (leads_to == "good")
    if other.exists():
        verify(other)
    assert sorted(one.name for one in tmp_path.iterdir() if "partial" in one.name) == []
    bad = tmp_path / "bad.ckpt"
    bad.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"bad.ckpt'` is empty.*The last good checkpoint there is '.*last.ckpt'"):
        verify(bad)


def test_a_link_of_a_partial_leads_nobody_astray(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "last.ckpt.partial").symlink_to(precious)
    write_file(tmp_path / "last.ckpt", 1)
    assert precious.read_text() == "mine"


def test_a_replaced_folder_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    from lightning_memfit.strategies import checkpoints

    path = tmp_path / "last.ckpt"
    write_folder(path, 1)

    def in_use(folder):
        if os.path.lexists(folder):
            raise OSError(16, "Device or resource busy", str(folder))

    monkeypatch.setattr(checkpoints, "remove", in_use)
    with pytest.warns(UserWarning, match="last.ckpt' replaced can't be removed: .*busy"):
        write_folder(path, 2)
    verify(path)
    assert (path / "shard-0").read_bytes() == bytes([2]) * 20_000


def test_the_search_for_a_free_name_ends(tmp_path, monkeypatch):
    from contextlib import ExitStack

    from lightning_memfit.strategies import integrity

    monkeypatch.setattr(integrity, "_MOST_WRITERS", 3)
    path = tmp_path / "last.ckpt"
    with ExitStack() as others:
        for _ in range(3):
            others.enter_context(integrity.partial_of(path, is_folder=False))
        with pytest.raises(CheckpointError, match="3 files beside .*last.ckpt' are in use"):
            write_file(path, 1)
    write_file(path, 1)
    verify(path)


def fails_on_one(strategy: str, folder: Path, failing: int, error: BaseException) -> tuple[str, float]:
    """Save under a strategy where a rank can't write, as its part of a folder is a file already or may not be made."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_memfit import strategies
    from tests.helpers.trainers import quiet_trainer

    os.environ["DS_ACCELERATOR"] = "cpu"
    rank = int(os.environ["RANK"])
    kind, options = STRATEGIES[strategy]
    trainer = quiet_trainer(strategy=getattr(strategies, kind)(**options), devices=2, max_steps=1, limit_val_batches=0)
    trainer.fit(BoringModel())
    save, begin, words = torch.save, time.monotonic(), "saved"
    torch.save = partial(refuses, error) if rank == failing else save
    try:
        trainer.save_checkpoint(folder / "last.ckpt")
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
    torch.save, seconds = save, time.monotonic() - begin
    time.sleep(3)  # this rank stays alive: the others must not need its end to notice
    return words, seconds


def refuses(error, *args, **kwargs):
    """In place of torch's, as root may write anywhere."""
    raise error


STRATEGIES = {
    "zero_2": ("ZeroStrategy", {"stage": 2}),
    "zero_3": ("ZeroStrategy", {"stage": 3}),
    "fsdp2": ("FullyShardedStrategy", {"process_group_backend": "gloo"}),
}


@pytest.mark.nightly_cases("zero_2-")
@pytest.mark.parametrize(
    ("strategy", "failing", "error"),
    [
        ("zero_2", 1, PermissionError(13, "Permission denied", "shard")),
        ("zero_3", 0, PermissionError(13, "Permission denied", "shard")),
        ("fsdp2", 0, PermissionError(13, "Permission denied", "shard")),
        ("zero_2", 0, KeyboardInterrupt("of one rank")),
    ],
)
def test_a_rank_that_fails_inside_a_save_ends_the_others(strategy, failing, error, tmp_path):
    pytest.importorskip("deepspeed")
    ended = run_ranks(fails_on_one, 2, tmp_path / "run", strategy, tmp_path, failing, error, seconds=90)
    assert all(one.result for one in ended), ended[1 - failing].output[-3000:]
    (own, _), (other, seconds) = ended[failing].result, ended[1 - failing].result
    assert str(error) in own
    assert f"rank {failing} failed in {type(error).__name__}" in other
    assert seconds < 3
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
