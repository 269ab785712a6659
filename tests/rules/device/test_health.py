from pathlib import Path

import pytest

from lightning_memfit.device import health
from lightning_memfit.device.health import Finding, driver_version, examine, hinders
from lightning_memfit.device.host import HostState
from lightning_memfit.memory import GIB, MIB


@pytest.mark.parametrize(
    ("facts", "levels", "words"),
    [
        (("570.86", None, "12.8", True), "ok ok ok", ""),
        ((None, "NVMLError: not found", None, False), "note note note", "none needed for the CPU"),
        (("570.86", "NVMLError_Unknown", "12.8", True), "ok note ok", "nvidia-smi"),
        (("570.86", None, None, False), "ok ok problem", "index-url"),
        (("470.1", None, "13.0", False), "ok ok problem", "update the driver"),
    ],
)
def test_gpu(facts: tuple, levels: str, words: str) -> None:
    findings = health.check_gpu(*facts)
    assert " ".join(finding.level for finding in findings) == levels
    assert words in " ".join(finding.fix for finding in findings)


def test_versions() -> None:
    requirements = ["torch>=2.9,<2.14", "rich>=13", "peft>=0.18; extra == 'lora'", "psutil"]
    found = health.check_versions({"torch": "2.15.0", "rich": "14.1", "psutil": None}, requirements)
    assert [(f.name, f.level) for f in found] == [("torch", "problem"), ("rich", "ok"), ("psutil", "problem")]
    assert found[0].found == "2.15.0"
    assert "<2.14" in found[0].fix


def test_memory() -> None:
    free = HostState(64 * GIB, 32 * GIB, None)
    assert {found.level for found in health.check_memory(free, 64 * GIB, (8 * GIB, 8 * GIB))} == {"ok"}
    short = HostState(3 * GIB, 2 * GIB, 8 * MIB)
    host, locked, shared = health.check_memory(short, 64 * GIB, (64 * MIB, 60 * MIB))
    assert (host.level, locked.level, shared.level) == ("problem", "note", "problem")
    assert "limited to 3.00 GiB" in host.found
    assert "ulimit -l" in locked.fix
    assert "--shm-size" in shared.fix
    assert health.check_memory(free, 64 * GIB, None)[2].level == "note"


def test_direct_io() -> None:
    assert health.check_direct_io("/data", None).level == "ok"
    assert "Invalid argument" in health.check_direct_io("/data", "Invalid argument").found


def test_only_problems_hinder() -> None:
    assert not hinders([Finding("a", "ok", "x"), Finding("b", "note", "x", "y")])
    assert hinders([Finding("a", "ok", "x"), Finding("b", "problem", "x", "y")])


def test_driver_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\nGCC version:")
    assert driver_version(file) == "570.124.06"


def test_examine_reads_this_machine_and_leaves_nothing(tmp_path: Path) -> None:
    findings = examine(str(tmp_path))
    names = {finding.name for group in findings.values() for finding in group}
    assert {"driver", "NVML", "CUDA", "bitsandbytes", "libaio", "/dev/shm", "O_DIRECT", "disk speed", "torch"} <= names
    assert list(tmp_path.iterdir()) == []


def test_examine_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    disk = examine(str(tmp_path / "nowhere"))["disk"]
    assert [(finding.name, finding.level) for finding in disk] == [("disk space", "problem")]
