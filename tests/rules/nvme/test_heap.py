import subprocess
import sys

import pytest

from lightning_memfit.memory.process import return_freed_memory

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
