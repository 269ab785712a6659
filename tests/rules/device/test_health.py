from pathlib import Path

import pytest

from lightning_memfit.device import health
from lightning_memfit.device import health as capacity
from lightning_memfit.device.health import Finding, driver_version, examine, hinders, num_nvidia_cards
from lightning_memfit.memory import GIB, MIB


def test_driver() -> None:
    assert health.check_driver("570.86", 1).level == "ok"
    assert health.check_driver(None, 0).level == "note"
    missing = health.check_driver(None, 2)
    assert missing.level == "problem"
    assert "2 NVIDIA" in missing.found
    assert "install the NVIDIA driver" in missing.fix


def test_nvml() -> None:
    assert health.check_nvml(None, "570.86").level == "ok"
    assert health.check_nvml("NVMLError: not found", None).level == "note"
    assert "reboot" in health.check_nvml("Driver/library version mismatch", "570.86").fix
    assert "nvidia-ml-py" in health.check_nvml("ModuleNotFoundError: pynvml", "570.86").fix
    missing = health.check_nvml("NVMLError_LibraryNotFound: NVML Shared Library Not Found", "570.86")
    assert (missing.level, "compute,utility" in missing.fix, "pip" in missing.fix) == ("note", True, False)
    assert "nvidia-smi" in health.check_nvml("NVMLError_Unknown: Unknown Error", "570.86").fix


def test_cuda() -> None:
    assert health.check_cuda("12.8", True, "570.86").level == "ok"
    assert health.check_cuda(None, False, None).level == "note"
    assert "index-url" in health.check_cuda(None, False, "570.86").fix
    assert "update the driver" in health.check_cuda("13.0", False, "470.1").fix


def test_bitsandbytes() -> None:
    assert health.check_bitsandbytes(None, "libbitsandbytes_cpu.so", cuda=False).level == "ok"
    assert health.check_bitsandbytes(None, "libbitsandbytes_cuda128.so", cuda=True).level == "ok"
    assert health.check_bitsandbytes(None, "libbitsandbytes_cpu.so", cuda=True).level == "problem"
    assert "pip install" in health.check_bitsandbytes("ImportError: no", "", cuda=False).fix


def test_tools_are_notes_as_not_everybody_needs_them() -> None:
    assert health.check_tool("ninja", "/usr/bin/ninja", "DeepSpeed", "pip install ninja").found == "/usr/bin/ninja"
    missing = health.check_tool("ninja", None, "DeepSpeed", "pip install ninja")
    assert (missing.level, missing.fix) == ("note", "pip install ninja")


def test_versions() -> None:
    requirements = ["torch>=2.9,<2.14", "rich>=13", "peft>=0.18; extra == 'lora'", "psutil"]
    found = health.check_versions({"torch": "2.15.0", "rich": "14.1", "psutil": None}, requirements)
    assert [(f.name, f.level) for f in found] == [("torch", "problem"), ("rich", "ok"), ("psutil", "problem")]
    assert found[0].found == "2.15.0"
    assert "<2.14" in found[0].fix


def test_host_memory() -> None:
    assert capacity.check_host_memory(64 * GIB, 32 * GIB, None).level == "ok"
    short = capacity.check_host_memory(64 * GIB, 2 * GIB, 3 * GIB)
    assert short.level == "problem"
    assert "limited to 3.00 GiB" in short.found


def test_locked_memory() -> None:
    assert capacity.check_locked_memory(None).level == "ok"
    assert capacity.check_locked_memory(1 * GIB).level == "ok"
    assert "ulimit -l" in capacity.check_locked_memory(8 * MIB).fix


def test_shared_memory() -> None:
    assert capacity.check_shared_memory(8 * GIB, 8 * GIB).level == "ok"
    assert "--shm-size" in capacity.check_shared_memory(64 * MIB, 60 * MIB).fix
    assert capacity.check_shared_memory(None, 0).level == "note"


def test_disk() -> None:
    assert capacity.check_disk_space("/data", 100 * GIB).level == "ok"
    assert capacity.check_disk_space("/data", 0).level == "problem"
    assert capacity.check_direct_io("/data", None).level == "ok"
    assert "Invalid argument" in capacity.check_direct_io("/data", "Invalid argument").found
    assert capacity.check_disk_speed(2e9, 3e9).level == "ok"
    assert "NVMe" in capacity.check_disk_speed(0.1e9, 3e9).fix


def test_only_problems_hinder() -> None:
    assert not hinders([Finding("a", "ok", "x"), Finding("b", "note", "x", "y")])
    assert hinders([Finding("a", "ok", "x"), Finding("b", "problem", "x", "y")])


def test_a_finding_has_a_fix_unless_all_is_well() -> None:
    with pytest.raises(ValueError, match="fix"):
        Finding("a", "problem", "x")
    with pytest.raises(ValueError, match="fix"):
        Finding("a", "ok", "x", "y")


def test_driver_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\nGCC version:")
    assert driver_version(file) == "570.124.06"


def test_cards_are_counted(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert num_nvidia_cards(tmp_path) == 1
    assert num_nvidia_cards(tmp_path / "nowhere") == 0


def test_examine_reads_this_machine_and_leaves_nothing(tmp_path: Path) -> None:
    findings = examine(str(tmp_path))
    names = {finding.name for group in findings.values() for finding in group}
    assert {"driver", "NVML", "CUDA", "bitsandbytes", "libaio", "/dev/shm", "O_DIRECT", "disk speed", "torch"} <= names
    assert list(tmp_path.iterdir()) == []


def test_examine_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    disk = examine(str(tmp_path / "nowhere"))["disk"]
    assert [(finding.name, finding.level) for finding in disk] == [("disk space", "problem")]
