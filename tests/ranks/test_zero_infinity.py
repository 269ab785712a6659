"""ZeRO-Infinity with real files and real asynchronous I/O: the losses of plain torch, and nothing left on the drive.

Losses agree as under the other stages (1e-6, over four optimizer steps). In bf16 they do so with the same kernel; the
fused one, which is the default for a step on the host, rounds some weights the other way, which moves losses by 5e-4.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memfit.estimate.deepspeed import DeepSpeedRun, deepspeed_memory
from lightning_memfit.estimate.deepspeed_sizes import infinity_sizes
from lightning_memfit.memory import MIB, Tier
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.nvme.folder import find_runs
from tests.helpers.aio import needs_aio
from tests.helpers.small_drive import small_drive
from tests.helpers.strategy_launch import finish, launch_anew, selected, start
from tests.helpers.strategy_scenarios import evaluate_whole

pytest.importorskip("deepspeed")
pytestmark = needs_aio

# Matrices of 1 MiB and more, which alone are swapped.
MODULE: dict[str, Any] = {
    "config": {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 512,
        "n_head": 2,
        "vocab_size": 128,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
}
SAME_KERNEL = {"optimizer_options": {"foreach": True}}
CHECKPOINTING = {"class_path": "lightning_memfit.techniques.activation_checkpointing.ActivationCheckpointing"}
SCENARIOS = "tests.helpers.strategy_scenarios"
SMALL_RESERVE = {"disk_reserve": "16MiB"}


def case(drive: Path, init_args: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    arguments = {"nvme_path": str(drive)} | (init_args or {})
    strategy = {"class_path": "lightning_memfit.strategies.zero_infinity.ZeroInfinityStrategy", "init_args": arguments}
    return {"strategy": strategy, "module": MODULE} | options


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="module")
def one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, drive: Path) -> dict[str, Any]:
    clipped = {"accumulate": 2, "clip": 0.5}
    cases = {
        "both": case(drive, **clipped),
        "optimizer": case(drive, {"offload_parameters": False}, **clipped),
        "parameters": case(drive, {"offload_optimizer": False}, **clipped),
        "in_host": case(drive, {"params_in_host": 2 * MIB}, **clipped),
        "checkpointing": case(drive, callbacks=[CHECKPOINTING], **clipped),
        "bf16": case(drive, precision="bf16-mixed"),
        "bf16_same_kernel": case(drive, precision="bf16-mixed", module=MODULE | SAME_KERNEL),
    }
    asked = {of["name"] for of in selected(request, test_losses_are_those_of_plain_torch.__name__)} or {"both"}
    cases = {name: one for name, one in cases.items() if name in asked}
    return launch_anew(tmp_path_factory.mktemp("one-rank"), cases)


@pytest.mark.nightly_cases("bf16_same_kernel-", "checkpointing-", "in_host-", "optimizer-", "parameters-")
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("both", 1e-6),
        ("optimizer", 1e-6),
        ("parameters", 1e-6),
        ("in_host", 1e-6),
        ("checkpointing", 1e-6),
        ("bf16", 1e-3),
        ("bf16_same_kernel", 1e-6),
    ],
)
def test_losses_are_those_of_plain_torch(one_rank: dict[str, Any], name: str, tolerance: float) -> None:
    result = one_rank[name]
    assert result["losses"] == pytest.approx(result["plain"], abs=tolerance, rel=0)
    assert result["losses"][-1] < result["losses"][0] - 0.5


def test_nothing_is_left_on_the_drive(one_rank: dict[str, Any], drive: Path) -> None:
    assert list(drive.iterdir()) == []


@pytest.mark.nightly
def test_two_ranks_share_a_folder_and_the_work(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    result = launch_anew(tmp_path, {"two": case(drive, devices=2, callbacks=[CHECKPOINTING], clip=0.5)})["two"]
    assert result["losses"] == pytest.approx(result["plain"], abs=1e-6, rel=0)
    assert list(drive.iterdir()) == []


# What lies on disk. Beside it "memory": stage 3, which `test_zero_checkpoints` holds against DDP.
ON_DISK: dict[str, dict[str, Any]] = {
    "both": {},
    "optimizer": {"offload_parameters": False},
    "parameters": {"offload_optimizer": False},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are."""
    folder = tmp_path_factory.mktemp("kept")
    for name in ("memory", *ON_DISK):
        (folder / name).mkdir()
    return folder


def scenarios(drive: Path, kept: Path, *names: str) -> dict[str, dict[str, Any]]:
    cases = {what: case(drive, init_args) for what, init_args in ON_DISK.items()}
    cases = {"memory": {"strategy": "memfit_zero_3", "module": MODULE}} | cases
    return {
        f"{what}/{name}": common | {"scenario": f"{SCENARIOS}.{name}", "folder": str(kept / what)}
        for what, common in cases.items()
        for name in names
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, drive: Path, kept: Path) -> dict[str, Any]:
    return launch_anew(tmp_path_factory.mktemp("saved"), scenarios(drive, kept, "save"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, saved: Any, drive: Path, kept: Path) -> dict[str, Any]:
    """In another process, where parameters are counted otherwise than in the one that saved."""
    return launch_anew(tmp_path_factory.mktemp("resumed"), scenarios(drive, kept, "resume", "validate"))


@pytest.mark.nightly
@pytest.mark.parametrize("what", ON_DISK)
def test_saved_and_resumed_exactly(
    saved: dict[str, Any], resumed: dict[str, Any], drive: Path, kept: Path, what: str
) -> None:
    plain = saved["memory/save"]
    for key in ("whole", "first", "val_loss", "test_loss"):
        assert saved[f"{what}/save"][key] == pytest.approx(plain[key], abs=1e-6, rel=0)
    losses = resumed[f"{what}/resume"]["losses"]
    assert losses == pytest.approx(resumed["memory/resume"]["losses"], abs=1e-6, rel=0)
    assert resumed[f"{what}/validate"]["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-6)
    assert evaluate_whole(str(kept / what / "half.ckpt"), ranks=1) == pytest.approx(plain["val_loss"], abs=1e-6)
    assert list(drive.iterdir()) == []


@pytest.mark.nightly
def test_drive_that_fills_up_while_training(tmp_path: Path) -> None:
    """The states take 121 MiB; then another program fills the drive to below the reserve."""
    with small_drive(tmp_path, 240) as drive:
        many = case(drive, SMALL_RESERVE, steps=100_000, expect_error=True)
        process = start(tmp_path, {"full": many})
        try:
            wait_for(lambda: any(state.size_bytes > 110 * MIB for state in find_runs(drive)), process)
            with (drive / "other").open("wb") as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(os.urandom(MIB))
                    file.flush()
        finally:
            results = finish(tmp_path, process)
        assert "DiskWatermarkError" in results["full"]["error"]
        assert "resume from the last checkpoint" in results["full"]["error"]
        assert find_runs(drive) == []


def predicted_disk_bytes() -> int:
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {name: value for name, value in MODULE["config"].items() if name != "model_type"}
    with torch.device("meta"):
        table = parameter_table(GPT2LMHeadModel(GPT2Config(**options)))
    distinct = [p for p in table if not p.shared_with]
    groups = [[p.numel for p in distinct if p.dims > 1], [p.numel for p in distinct if p.dims == 1]]
    sizes = infinity_sizes(groups, itemsize=4)
    run = DeepSpeedRun(table, itemsize=4, offload_optimizer="nvme", offload_parameters="nvme", sizes=sizes)
    return deepspeed_memory(run).kept.total(Tier.DISK)


@pytest.mark.nightly
def test_killed_run_is_cleaned_up_after_resumed_and_exported(tmp_path: Path, resumed: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    from cli.main import main
    from lightning_memfit.strategies.checkpoint_io import consolidated

    drive, kept = tmp_path / "drive", tmp_path / "kept"
    for folder in (drive, kept):
        folder.mkdir()
    common, predicted = case(drive, folder=str(kept)), predicted_disk_bytes()
    process = start(tmp_path, {"killed": common | {"scenario": f"{SCENARIOS}.until_killed"}})
    wait_for(lambda: (kept / "half.ckpt").is_dir(), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    (left,) = find_runs(drive)
    assert left.is_stale
    assert left.size_bytes == pytest.approx(predicted, rel=0.05)

    results = launch_anew(tmp_path, {"next": common | {"scenario": f"{SCENARIOS}.resume"}})
    assert list(drive.iterdir()) == []
    expected = resumed["memory/resume"]["losses"]
    assert results["next"]["losses"] == pytest.approx(expected, abs=1e-6, rel=0)

    source, target = kept / "half.ckpt", tmp_path / "exported"
    assert main(["export", "--ckpt_path", str(source), "--folder", str(target), "--tokenizer", "bytes"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(target).state_dict()
    for name, weight in consolidated(source)["state_dict"].items():
        assert torch.equal(exported[name.removeprefix("model.")], weight)


def test_refused_before_a_weight_is_made(tmp_path: Path) -> None:
    with small_drive(tmp_path, 100) as drive:
        bits = MODULE | {"optimizer": "bitsandbytes.optim.AdamW8bit"}
        refused = launch_anew(
            tmp_path,
            {
                "small": case(drive, SMALL_RESERVE, expect_error=True),
                "missing": case(tmp_path / "missing", expect_error=True),
                "bits": case(tmp_path, module=bits, expect_error=True),
            },
        )
    assert "disk space: " in refused["small"]["error"]
    assert "does not exist; make the folder" in refused["missing"]["error"]
    assert "can't keep its states on disk" in refused["bits"]["error"]
    assert not (tmp_path / "missing").exists()
    assert find_runs(tmp_path) == []


def wait_for(condition: Any, process: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
