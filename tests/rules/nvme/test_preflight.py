"""Traffic and room of a drive, host memory, and what freed memory leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memfit.estimate.deepspeed import DeepSpeedMemory
from lightning_memfit.memory import GIB, Category, MemoryBreakdown, Tier
from lightning_memfit.memory.process import return_freed_memory
from lightning_memfit.nvme.preflight import host_memory
from lightning_memfit.nvme.traffic import step_traffic
from lightning_memfit.nvme.watermark import DiskWatermarkError, check_reserve, free_bytes


def test_bytes_per_parameter_of_adam() -> None:
    bf16, fp32 = step_traffic(1, 1, 2), step_traffic(1, 1, 4)
    assert (bf16.read_bytes, bf16.written_bytes) == (20, 18)
    assert (fp32.read_bytes, fp32.written_bytes) == (24, 20)


def test_micro_batches_read_weights_again_and_write_nothing() -> None:
    plain, more = step_traffic(1, 1), step_traffic(1, 1, micro_batches=3)
    assert more.read_bytes - plain.read_bytes == 2 * (6 - 2)
    assert more.written_bytes == plain.written_bytes


def test_too_little_room_ends_a_run(tmp_path: Path) -> None:
    check_reserve(tmp_path, 4096)
    with pytest.raises(DiskWatermarkError, match=r"left free at .* resume from the last checkpoint"):
        check_reserve(tmp_path, 2 * free_bytes(tmp_path))


PINNED = MemoryBreakdown.on(Tier.PINNED_HOST, {Category.COMMUNICATION: 3 * GIB})
MOMENTS = {
    "passes": PINNED + MemoryBreakdown.device({Category.TEMPORARY: 5 * GIB}),
    "update": PINNED + MemoryBreakdown.on(Tier.HOST, {Category.GRADIENT: GIB}),
}
MEMORY = DeepSpeedMemory(MOMENTS, PINNED, on_cpu=True)


def test_refusal_says_when_what_for_and_how_much_is_missing() -> None:
    finding = host_memory(MEMORY, 2, 6 * GIB, "buy more")
    assert finding.level == "problem"
    assert finding.fix == "buy more"
    assert finding.found == (
        "16.00 GiB needed by 2 ranks in the moment 'passes' (each 5.00 GiB device temporary, 3.00 GiB pinned host "
        "communication), and activations, 6.00 GiB free"
    )
    assert host_memory(MEMORY, 1, 8 * GIB, "").level == "ok"


FREES = """
import sys, torch
from lightning_memfit.memory import MIB
from lightning_memfit.memory.process import rss_bytes
from lightning_memfit.memory.process import return_freed_memory

if sys.argv[1] == "returned":
    assert return_freed_memory()
torch.ones(31 * MIB // 4)  # freed at once: glibc takes it for the size of things to come
before = rss_bytes()
kept, freed = [], []
for _ in range(8):
    freed.append(torch.ones(16 * MIB // 4))
    kept.append(torch.ones(1024))  # so that no heap can shrink from its end
freed.clear()
print((rss_bytes() - before) // MIB)
"""


def left_after_freeing(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", FREES, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.nightly
def test_freed_memory_leaves_the_process() -> None:
    """128 MiB in blocks of 16 are freed, with something small kept between them."""
    if not return_freed_memory():
        pytest.skip("the C library is not glibc")
    # A system that is short of memory may take pages away meanwhile.
    assert any(left_after_freeing("plain") >= 32 for _ in range(3))  # else there would be nothing to do
    assert left_after_freeing("returned") < 8


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert return_freed_memory() is False
