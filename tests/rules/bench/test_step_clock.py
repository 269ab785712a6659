"""What a run adds to resident memory, whatever was there before."""

import subprocess
import sys

import pytest

from lightning_memfit.bench.step_clock import ResidentGrowth

MIB = 2**20


GROWS = """
import torch
from lightning_memfit.bench.step_clock import ResidentGrowth

before = torch.ones(64 << 18)
growth = ResidentGrowth()
assert growth.growth_bytes is None
growth.start()
unknown = growth.growth_bytes is None
held = torch.ones(48 << 18)
del held, before
print("GROWTH", "unknown" if unknown else growth.growth_bytes)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_growth_is_the_peak_since_the_start() -> None:
    """In a process of its own: one that has run other tests may have room that is resident already."""
    done = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True)
    found = done.stdout.split("GROWTH ")[1].strip()
    if found == "unknown":
        pytest.skip("this kernel does not reset the peak of the resident set")
    assert int(found) == pytest.approx(48 * MIB, abs=12 * MIB)


def test_without_the_kernels_help_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr("lightning_memfit.bench.step_clock._CLEAR", tmp_path / "missing" / "clear_refs")
    growth = ResidentGrowth()
    growth.start()
    assert growth.growth_bytes is None
