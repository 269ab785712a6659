"""What only POSIX systems have may be missing: everything imports all the same, and steps are estimated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_WITHOUT_POSIX = """
import enum, os, pkgutil, select, signal, sys, warnings
import bitsandbytes, lightning, psutil, torch, torchmetrics, transformers
import lightning.pytorch.cli, torch.distributed.checkpoint, torch.distributed.fsdp, torch.utils.checkpoint

import lightning.pytorch.trainer.connectors.signal_connector as handlers

warnings.simplefilter("ignore")
# Lightning takes SIGKILL and SIGSTOP for granted elsewhere.
handlers._IS_WINDOWS, signal.valid_signals = True, lambda: {signal.SIGINT, signal.SIGTERM, signal.SIGABRT}
gone = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGALRM", "SIGCHLD", "SIGQUIT")
signal.Signals = enum.IntEnum("Signals", {n: v for n, v in signal.Signals.__members__.items() if n not in gone})
for name in gone:
    delattr(signal, name)
for name in ("register_at_fork", "fork", "forkpty", "killpg", "getuid", "geteuid", "getpgid", "setsid", "statvfs",
             "sched_getaffinity", "uname", "O_DIRECT", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC",
             "posix_fadvise", "posix_fallocate", "getloadavg", "ST_RDONLY"):
    if hasattr(os, name):
        delattr(os, name)
del select.poll
for name in ("fcntl", "pwd", "grp", "pty", "syslog"):  # huggingface_hub asks the system's name for termios and tty
    sys.modules[name] = None
"""

_IMPORTS = """
import cli, lightning_memfit
from importlib import import_module
for package in (lightning_memfit, cli):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".upstream" not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)
for name in lightning_memfit.__all__:
    getattr(lightning_memfit, name)
"""

_ESTIMATE = """
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_memfit import MemoryLimit, MemoryMonitor, Preemption, estimate_step, profile_module
from cli.main import main

found = estimate_step(profile_module(BoringModel(), torch.randn(4, 32)), 8)
assert found.allocated_bytes > 0
Preemption()
options = {"max_steps": 1, "limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
options |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
trainer = lightning.pytorch.Trainer(callbacks=[MemoryMonitor(), Preemption()], **options)
trainer.fit(BoringModel())
assert trainer.global_step == 1
assert main(["estimate", "--model", "gpt2", "--sequence-length", "16", "--device", "12GiB", "--no-cache"]) == 0
"""

_DISK = """
from lightning_memfit.nvme.folder import RunFolder
try:
    RunFolder.create(".", "run1")
except ValueError as error:
    print(error)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "MEMFIT_CACHE": str(folder)}
    command = [sys.executable, "-c", _WITHOUT_POSIX + code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.nightly
def test_everything_imports_estimates_and_trains_without_what_posix_has(tmp_path: Path) -> None:
    done = run(_IMPORTS + _ESTIMATE, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Fits" in done.stdout


@pytest.mark.nightly
def test_training_from_disk_is_refused_by_name(tmp_path: Path) -> None:
    done = run(_DISK, tmp_path)
    assert (
        done.stdout
        == "`nvme_path` '.' can't be locked: this system has no file locks of POSIX: train from disk on Linux.\n"
    )
