"""The recipes for several GPUs run here with their quick override, and are what their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cli.recipe_files import resolve
from tests.helpers.aio import needs_aio
from tests.helpers.ranks import free_port
from tests.helpers.strategy_launch import run_program

pytest.importorskip("deepspeed")
ROOT = Path(__file__).parents[3]
GPT2 = ("gpt2xl_ddp", "gpt2xl_fsdp2", "gpt2xl_zero2", "gpt2xl_zero3_offload", "multi_node")
RECIPES = (*GPT2, "blenderbot_zero2")
FROM_DISK = "gpt2xl_zero_infinity"
TOGETHER = "gpt2large_tensor_parallel"
RUN_ALL = """
import sys
from cli.main import main
for name in sys.argv[1:]:
    quick = "quick/blenderbot_zero2" if name == "blenderbot_zero2" else "quick/gpt2xl"
    one_rank = ["--trainer.strategy.init_args.sharding_size=1"] if name == "multi_node" else []
    print("RESULT", name, main(["fit", "--config", name, "--config", quick, *one_rank]), flush=True)
"""


def read(name):
    return yaml.safe_load(Path(resolve(name)).read_text())


def _interpreter(code, *arguments, **options):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, **options)


def run_all(folder, *names, start=run_program, **variables):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment |= variables
    run = start(RUN_ALL, *names, cwd=folder, env=environment, timeout=420)
    for name in names:
        assert f"RESULT {name} 0" in run.stdout, run.stderr[-4000:]
        assert list((folder / "runs" / name).rglob("*.ckpt"))


@pytest.mark.nightly
def test_each_runs_with_its_quick_override(tmp_path):
    run_all(tmp_path, *RECIPES)


@pytest.mark.nightly
@needs_aio
def test_the_recipe_from_disk_takes_its_folder_from_the_environment(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TORCH_EXTENSIONS_DIR") if name in os.environ}
    # In an interpreter of its own, which removes its folder on the drive as it exits.
    run_all(tmp_path, FROM_DISK, start=_interpreter, MEMFIT_NVME_PATH=str(drive), **kept)
    assert list(drive.iterdir()) == []


@pytest.mark.nightly
def test_two_processes_compute_together(tmp_path):
    command = [sys.executable, "-m", "lightning_memfit.cli", "fit", "--config", TOGETHER, "--config", "quick/gpt2xl"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    arguments = [*command, "--trainer.devices=2"]
    run = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "2 blocks of GPT-2 among 2 ranks each" in run.stdout + run.stderr
    (folder,) = (tmp_path / "runs" / TOGETHER).rglob("*.ckpt")
    assert (folder / "meta.pt").is_file()
    assert "summary/measured_peak_gib" in next(folder.parents[1].glob("metrics.csv")).read_text()


@pytest.mark.nightly
def test_long_chats_on_one_device_and_on_two_machines_that_share_sequences(tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    quick = ["--config", "quick/long_chat"]
    alone = [sys.executable, "-m", "lightning_memfit.cli", "fit", "--config", "long_chat", *quick]
    shared = ["--config", "long_chat_8", *quick, "--trainer.devices=1", "--trainer.num_nodes=2"]
    shared += ["--trainer.strategy.init_args.sequence_parallel_size=2"]
    port = str(free_port())
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launch += ["--master_addr", "127.0.0.1", "--master_port", port]
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    runs = [subprocess.Popen(alone, **options)]
    for node in ("0", "1"):
        command = [*launch, "--node_rank", node, "-m", "lightning_memfit.cli", "fit", *shared]
        runs.append(subprocess.Popen(command, **options))
    for run in runs:
        said, _ = run.communicate(timeout=240)
        assert run.returncode == 0, said[-4000:]
    losses = []
    for name in ("long_chat", "long_chat_8"):
        (checkpoint,) = (tmp_path / "runs" / name).rglob("*.ckpt")
        losses.append(float(checkpoint.stem.rpartition("=")[2]))
    assert losses[0] == pytest.approx(losses[1], abs=0.02)  # weights in bfloat16, and autocast


def test_two_machines_shard_within_each():
    recipe = read("multi_node")["trainer"]
    assert recipe["num_nodes"] == 2
    assert recipe["strategy"]["init_args"]["sharding_size"] == recipe["devices"]
