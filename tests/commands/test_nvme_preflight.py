"""What stops a run with ZeRO-Infinity, under the real conditions: drives that are small, full, read-only or shared."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memfit.device.host import probe_host
from lightning_memfit.estimate.deepspeed import DeepSpeedMemory, DeepSpeedRun, deepspeed_memory
from lightning_memfit.estimate.deepspeed_sizes import infinity_sizes
from lightning_memfit.memory import GIB, MIB, format_bytes
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.nvme.folder import RunFolder
from lightning_memfit.nvme.preflight import preflight, require, sentence
from lightning_memfit.nvme.watermark import DiskWatermarkError, check_reserve
from tests.helpers.aio import needs_aio_tools
from tests.helpers.small_drive import drive_without_direct_io, small_drive

LAYERS = 16
PARAMETERS = tuple(ParameterInfo(f"h.{i}.weight", MIB, 2, shape=(1024, 1024)) for i in range(LAYERS))


def memory_of(parameters: tuple[ParameterInfo, ...] = PARAMETERS, **options: Any) -> DeepSpeedMemory:
    """Of 16 million parameters in bf16: 288 MiB on disk."""
    sizes = infinity_sizes([[parameter.numel for parameter in parameters]], world_size=options.get("world_size", 1))
    run = DeepSpeedRun(parameters, offload_optimizer="nvme", offload_parameters="nvme", sizes=sizes, **options)
    return deepspeed_memory(run)


def problems(folder: Path, memory: DeepSpeedMemory | None = None, **options: Any) -> dict[str, str]:
    """What `preflight` says, by subject."""
    found = preflight(folder, memory or memory_of(), **{"reserve_bytes": 64 * MIB, **options})
    return {finding.name: sentence(finding) for finding in found}


@pytest.fixture
def killed_run(tmp_path: Path) -> Path:
    """The folder of a run that was killed, with 8 MiB of swap file."""
    code = (
        "import os, signal, sys\n"
        "from lightning_memfit.nvme.folder import RunFolder\n"
        "swap = RunFolder.create(sys.argv[1], 'dead').path / 'zero_stage_3/optimizer/rank0'\n"
        "swap.mkdir(parents=True)\n"
        "(swap / '0_3.tensor.swp').write_bytes(os.urandom(8 << 20))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    (folder,) = tmp_path.iterdir()
    return folder


@needs_aio_tools
def test_good_folder(tmp_path: Path) -> None:
    assert problems(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    assert "does not exist; make the folder" in problems(folder)["nvme_path"]
    assert not folder.exists()
    with pytest.raises(RuntimeError, match=r"would fail:\n- .*nvme_path: .*does not exist"):
        require(folder, preflight(folder, memory_of()))


def test_file_system_mounted_read_only(tmp_path: Path) -> None:
    with small_drive(tmp_path, 16, "ro") as drive:
        assert "can't be written to; mount it writable" in problems(drive)["nvme_path"]
        with pytest.raises(ValueError, match="can't be written to"):
            RunFolder.create(drive, "run1")


def test_drive_that_is_too_small(tmp_path: Path) -> None:
    with small_drive(tmp_path, 200) as drive:
        assert problems(drive)["disk space"].startswith("disk space: 288.00 MiB needed, 1")
        assert [path.name for path in drive.iterdir()] == ["lost+found"]


def test_file_system_that_really_refuses_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with drive_without_direct_io(tmp_path) as drive:
        assert problems(drive)["disk space"].endswith("only the parameters to it.")
        monkeypatch.setattr("lightning_memfit.nvme.preflight.free_bytes", lambda folder: GIB)
        problem = problems(drive)["O_DIRECT"]
        assert problem.startswith("O_DIRECT: Invalid argument in ")
        assert "a local ext4 or xfs drive" in problem


def test_folder_of_a_killed_run_is_counted_as_free_and_removed_at_the_start(
    killed_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memfit.nvme.preflight.free_bytes", lambda folder: (288 + 60) * MIB)
    assert "disk space" not in problems(killed_run.parent)
    assert killed_run.exists()
    RunFolder.create(killed_run.parent, "next").close()
    assert not killed_run.exists()
    assert "disk space" in problems(killed_run.parent)


def problems_in_a_process(folder: Path, *command: str, before: str = "") -> str:
    """What `preflight` finds in a process of its own, started by a command that takes something away from it."""
    code = (
        f"import sys\n{before}\n"
        "from tests.commands.test_nvme_preflight import problems\n"
        "print(*problems(sys.argv[1]).values(), sep='\\n')\n"
    )
    arguments, root = [*command, sys.executable, "-c", code, str(folder)], Path(__file__).parents[2]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=root).stdout


@pytest.mark.nightly
def test_libaio_absent(tmp_path: Path) -> None:
    """Its header is hidden from one process and its children."""
    header = Path("/usr/include/libaio.h")
    hide = ["unshare", "--mount", "sh", "-c", f'mount --bind /dev/null {header} && exec "$@"', "sh"]
    if header.is_file() and subprocess.run([*hide, "true"], capture_output=True, check=False).returncode:
        pytest.skip("hiding a file from a process needs root and unshare")
    assert "libaio: " in (found := problems_in_a_process(tmp_path, *(hide if header.is_file() else ())))
    assert "apt install libaio-dev" in found


@pytest.mark.parametrize("on_cpu", [True, False])
def test_host_memory_of_a_small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """As if a container left 300 MiB; what two ranks take at their peak is more, though their states are not."""
    memory = memory_of(stage=3, world_size=2, bucket_size=MIB, on_cpu=on_cpu)
    options = {"ranks": 2, "device_free_bytes": None if on_cpu else GIB}
    free = replace(probe_host(), available_bytes=300 * MIB)
    monkeypatch.setattr("lightning_memfit.nvme.preflight.probe_host", lambda: free)
    problem, peak = problems(tmp_path, memory, **options)["host memory"], memory.host_peak_bytes
    assert f"{format_bytes(2 * peak)} needed by 2 ranks" in problem
    assert "pinned host communication" in problem
    assert "300.00 MiB free" in problem
    assert problem.endswith("divide the states among more machines.")
    enough = replace(free, available_bytes=2 * peak)
    monkeypatch.setattr("lightning_memfit.nvme.preflight.probe_host", lambda: enough)
    assert "host memory" not in problems(tmp_path, memory, **options)


@pytest.mark.nightly
def test_locked_memory_is_limited(tmp_path: Path) -> None:
    """In a process without root's right to lock what it likes."""
    drop = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"] if os.geteuid() == 0 else []
    if drop and shutil.which("setpriv") is None:
        pytest.skip("setpriv, to give up CAP_IPC_LOCK, is not installed")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))"
    found = problems_in_a_process(tmp_path, *drop, before=limit)
    assert "needed, 1.00 MiB free; `ulimit -l unlimited`" in found


def test_drive_that_fills_up_while_training(tmp_path: Path) -> None:
    with small_drive(tmp_path, 64) as drive:
        written = 0
        with pytest.raises(DiskWatermarkError, match="free some space there"), (drive / "other").open("wb") as file:
            while True:  # another program, or a checkpoint
                check_reserve(drive, 16 * MIB)
                written += file.write(bytes(MIB))
                file.flush()
        assert written > 16 * MIB
        assert shutil.disk_usage(drive).free > 8 * MIB  # in time
