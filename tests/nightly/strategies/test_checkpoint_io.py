"""Checkpoints that are whole or absent, checked before they are read, and never run what is hidden in them."""

import http.server
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from cli.main import main
from lightning_memfit import AtomicCheckpointIO
from lightning_memfit.strategies.checkpoint_io import consolidated
from lightning_memfit.strategies.integrity import MANIFEST, ZERO_MARK, CheckpointError, replacing_folder, verify
from lightning_memfit.strategies.safe_loading import UnsafeCheckpointError, load_index, without_code
from tests.helpers.small_drive import small_drive
from tests.helpers.trainers import quiet_trainer


def contents(value: float = 1.0, **extra: Any) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((300, 40), value)}, "epoch": 3, **extra}


def saved(path: Path, value: float = 1.0, **extra: Any) -> Path:
    AtomicCheckpointIO().save_checkpoint(contents(value, **extra), path)
    return path


def test_what_is_loaded_does_not_change_with_the_file(tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    path = saved(tmp_path / "last.ckpt", optimizer_states=[state], averages=torch.ones(3))
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    with path.open("r+b") as file:
        file.write(b"\1" * path.stat().st_size)
    assert torch.equal(loaded["state_dict"]["weight"], torch.ones(300, 40))
    assert torch.equal(loaded["optimizer_states"][0]["state"][0]["exp_avg"], torch.ones(3))
    assert torch.equal(loaded["averages"], torch.ones(3))


@pytest.mark.parametrize("seed", range(5))
def test_one_flipped_bit_is_found_in_a_renamed_copy(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = saved(tmp_path / "last.ckpt")
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data) // 10, len(data) * 9 // 10)] ^= 1 << chance.randrange(8)
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"copy\.ckpt'` is .*The last good checkpoint there is '.*last\.ckpt'"):
        AtomicCheckpointIO().load_checkpoint(copy)


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        path.write_text("Dear diary")
    elif how == "missing":
        path.unlink()
    elif how == "weights of something else":
        torch.save({"layer.weight": torch.ones(2)}, path)


DAMAGES = {
    "truncated": "is cut off",
    "empty": "is empty",
    "foreign": "or no checkpoint",
    "missing": "doesn't exist",
    "weights of something else": "is not a checkpoint of a CausalLM",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_the_command_line_says_it_in_one_message(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "last.ckpt")
    good = saved(tmp_path / "epoch=1.ckpt")
    damage(path, how)
    assert main(["export", "--ckpt_path", str(path), "--folder", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert DAMAGES[how] in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) <= 3
    assert "last.ckpt" in printed
    if how != "weights of something else":
        assert f"{str(good)!r}" in printed


@pytest.mark.parametrize("kept", [-1, -70, 1000])
def test_a_file_that_was_cut_is_damaged(tmp_path: Path, kept: int) -> None:
    path = saved(tmp_path / "last.ckpt")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="is cut off"):
        AtomicCheckpointIO().load_checkpoint(path)


def zip_of_something_else(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "Dear diary")


def test_another_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    zip_of_something_else(path)
    with pytest.raises(CheckpointError, match=r"x\.ckpt'` is no checkpoint: it is a zip archive that `torch.save` did"):
        AtomicCheckpointIO().load_checkpoint(path)


# --- full disks -----------------------------------------------------------------------------------------------------


def test_a_disk_that_gets_full_leaves_the_former_one(tmp_path: Path) -> None:
    with small_drive(tmp_path, 16) as drive:
        path = saved(drive / "last.ckpt")
        for target in (path, drive / "next.ckpt"):
            with pytest.raises(CheckpointError, match="could not be written"):
                saved(target, text="x" * (40 << 20))
        verify(path)
        assert AtomicCheckpointIO().load_checkpoint(path)["epoch"] == 3
        assert [one.name for one in drive.iterdir() if one.is_file()] == ["last.ckpt"]


def test_a_folder_on_a_full_disk_leaves_the_former_one(tmp_path: Path) -> None:
    def write(path: Path, size: int) -> None:
        with replacing_folder(path, ZERO_MARK) as folder:
            (folder / "weights").write_bytes(os.urandom(size))
            (folder / "latest").write_text("checkpoint")

    with small_drive(tmp_path, 16) as drive:
        path = drive / "last.ckpt"
        write(path, 1 << 20)
        with pytest.raises(CheckpointError, match="could not be written"):
            write(path, 40 << 20)
        verify(path)
        assert [one.name for one in drive.iterdir() if one.name != "lost+found"] == ["last.ckpt"]


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1 << 10, 1 << 10)  # 4 MiB, and 8 of moments

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(64, 1 << 10), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"save_top_k": 1, "monitor": "loss"}, {"save_last": True, "save_top_k": 1}])
def test_one_kept_checkpoint_survives_a_disk_that_fills_up(tmp_path: Path, options: dict[str, Any]) -> None:
    """Another program fills the drive, so that the next save fails: training goes on from the one before."""
    with small_drive(tmp_path, 64) as drive:
        folder = drive / "run"

        class Fills(pl.Callback):
            def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
                if trainer.global_step == 4:
                    with (drive / "other").open("wb") as file, pytest.raises(OSError, match="No space"):
                        while True:
                            file.write(os.urandom(1 << 20))
                            file.flush()

        keep = ModelCheckpoint(folder, every_n_train_steps=2, **options)
        made = {"plugins": [AtomicCheckpointIO()], "enable_checkpointing": True, "max_steps": 10}
        with pytest.raises(CheckpointError, match="could not be written"):
            quiet_trainer(Fills(), keep, **made).fit(Small())
        (drive / "other").unlink()
        found = sorted(folder.iterdir())
        assert found
        for one in found:
            verify(one)
        resumed = quiet_trainer(**(made | {"enable_checkpointing": False}))
        resumed.fit(Small(), ckpt_path=found[0])
        assert resumed.global_step == 10


# --- kills ----------------------------------------------------------------------------------------------------------


def _rewrite_for_ever(path: Path, began: Any) -> None:
    torch.set_num_threads(1)
    for value in range(1000):
        began.value = value
        saved(path, float(value), more=torch.ones(1 << 20))


def test_a_run_that_is_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    context, chance, path = multiprocessing.get_context("fork"), random.Random(0), tmp_path / "last.ckpt"
    inside = 0
    for _ in range(12):
        began = context.Value("i", -1)
        writer = context.Process(target=_rewrite_for_ever, args=(path, began))
        writer.start()
        while began.value < 1:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        inside += path.with_name("last.ckpt.partial").exists()
        verify(path)
        loaded = AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"]
        assert loaded.unique().numel() == 1
        assert float(loaded[0, 0]) in (began.value, began.value - 1)
    assert inside > 3  # in the middle of a file, and not between two
    saved(path)
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


# --- hidden code ----------------------------------------------------------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_code_hidden_in_a_file_never_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker, path = tmp_path / "ran", tmp_path / "last.ckpt"
    state = {"state": {0: {"exp_avg": Payload(marker)}}, "param_groups": []}
    for hidden in ({"hidden": Payload(marker)}, {"optimizer_states": [state]}):
        saved(path, **hidden)
        with pytest.raises(UnsafeCheckpointError, match=r"last\.ckpt' holds .*add_safe_globals") as refused:
            AtomicCheckpointIO().load_checkpoint(path)
        assert "weights_only" not in str(refused.value)
        assert main(["export", "--ckpt_path", str(path), "--folder", str(tmp_path / "out")]) == 2
        capsys.readouterr()
        assert not marker.exists()
    AtomicCheckpointIO().load_checkpoint(path, weights_only=False)  # asked for by name
    assert marker.exists()


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_code_hidden_at_an_address_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    marker, path = tmp_path / "ran", tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "hidden": Payload(marker)}, path)
    serve = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = {"file": f"file://{path}", "http": f"http://127.0.0.1:{server.server_port}/last.ckpt"}[scheme]
        with pytest.raises(UnsafeCheckpointError, match=f"^'{scheme}:.*' holds "):
            AtomicCheckpointIO().load_checkpoint(place)
        assert not marker.exists()
        AtomicCheckpointIO().load_checkpoint(place, weights_only=False)  # asked for by name
        server.shutdown()
    assert marker.exists()


def fsdp2_folder(folder: Path) -> Path:
    from torch.distributed.checkpoint import save

    state = {"optimizer_0": {"state": {"weight": {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 0.5}]}}
    save({"state_dict": {"weight": torch.ones(4)}, **state}, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 3}, folder / "meta.pt")
    return folder


def zero_folder(folder: Path) -> Path:
    inside = folder / "checkpoint"
    inside.mkdir(parents=True)
    group = {"lr": 0.5, "params": [0]}
    optimizer = {
        "zero_stage": 2,
        "partition_count": 1,
        "single_partition_of_fp32_groups": [torch.ones(4)],
        "group_paddings": [0],
        "base_optimizer_state": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [group]},
    }
    torch.save({"optimizer_state_dict": optimizer}, inside / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model = {"module": {}, "buffer_names": [], "param_shapes": [{"weight": torch.Size([4])}], "shared_params": {}}
    torch.save(model | {"epoch": 3}, inside / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("checkpoint")
    return folder


def hide(file: Path, marker: Path) -> None:
    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(Payload(marker)))
    elif file.suffix == ".distcp":
        _hide_in_shard(file, marker)
    else:
        torch.save(torch.load(file, weights_only=False) | {"hidden": Payload(marker)}, file)


def _hide_in_shard(file: Path, marker: Path) -> None:
    """Save the folder anew with the payload beside the weights."""
    from torch.distributed.checkpoint import save

    save({"state_dict": {"weight": torch.ones(4), "hidden": Payload(marker)}}, checkpoint_id=file.parent, no_dist=True)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (fsdp2_folder, "meta.pt"),
        (fsdp2_folder, ".metadata"),
        (fsdp2_folder, "*.distcp"),
        (zero_folder, "*/*model_states.pt"),
        (zero_folder, "*/*optim_states.pt"),
    ],
)
def test_code_hidden_in_a_sharded_folder_never_runs(tmp_path: Path, make: Any, pattern: str) -> None:
    folder, marker = make(tmp_path / "last.ckpt"), tmp_path / "ran"
    whole = consolidated(folder)
    assert torch.equal(whole["state_dict"]["weight"], torch.ones(4))
    assert whole["epoch"] == 3
    (file,) = folder.glob(pattern)
    hide(file, marker)
    with pytest.raises(UnsafeCheckpointError, match="neither a tensor nor a plain value"):
        AtomicCheckpointIO().load_checkpoint(folder)
    assert main(["export", "--ckpt_path", str(folder), "--folder", str(tmp_path / "out")]) == 2
    assert not marker.exists()


class Attribute:
    """Is pickled as Python 3.11.0 to 3.11.3 do it with members of enumerations, whichever this is."""

    def __init__(self, kind: type, name: str) -> None:
        self.of = kind, name

    def __reduce__(self) -> Any:
        return getattr, self.of


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_enumerations_are_read_as_every_python_writes_them(tmp_path: Path, protocol: int) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    index, file = tmp_path / ".metadata", tmp_path / "states.pt"
    index.write_bytes(pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"), protocol))
    assert load_index(index) is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    torch.save({"stage": Attribute(ZeroStageEnum, "gradients")}, file)
    (tmp_path / ZERO_MARK).touch()
    with without_code(tmp_path):
        assert torch.load(file)["stage"] is ZeroStageEnum.gradients
    for kind, name in ((_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "__class__")):
        index.write_bytes(pickle.dumps(Attribute(kind, name), protocol))
        with pytest.raises(UnsafeCheckpointError, match=f"metadata' holds the attribute '{name}' of {kind.__name__}"):
            load_index(index)
    for kind, name in ((ZeroStageEnum, "mro"), (torch.Size, "__class__")):
        torch.save({"stage": Attribute(kind, name)}, file)
        with (
            pytest.raises(UnsafeCheckpointError, match=f"the attribute '{name}' of {kind.__name__}"),
            without_code(tmp_path),
        ):
            torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("flip", "'weights' has changed"),
        ("cut", "'weights' has 999 bytes instead of 1000"),
        ("remove", "'weights' is missing"),
        ("manifest", "'weights' has 1000 bytes instead of 1001"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_last_good_one(tmp_path: Path, how: str, words: str) -> None:
    for name in ("good.ckpt", "last.ckpt"):
        with replacing_folder(tmp_path / name, ZERO_MARK) as folder:
            (folder / "weights").write_bytes(bytes(1000))
            (folder / "latest").write_text("checkpoint")
        verify(tmp_path / name)
    bad = tmp_path / "last.ckpt" / "weights"
    if how == "remove":
        bad.unlink()
    elif how == "manifest":
        manifest = bad.with_name(MANIFEST)
        manifest.write_text(manifest.read_text().replace("1000", "1001"))
    else:
        bad.write_bytes(bytes(999) + (b"\1" if how == "flip" else b""))
    with pytest.raises(CheckpointError, match=rf"last\.ckpt'` is .*{words}.*good\.ckpt'"):
        verify(tmp_path / "last.ckpt")
