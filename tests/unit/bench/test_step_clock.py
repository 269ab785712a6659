"""What a run adds to resident memory, whatever was there before."""

import sys

import pytest
import torch

from lightning_memfit.bench.step_clock import ResidentGrowth

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_growth_is_the_peak_since_the_start() -> None:
    before = torch.ones(64 * MIB // 4)
    growth = ResidentGrowth()
    assert growth.growth_bytes is None
    growth.start()
    if growth.growth_bytes is None:
        pytest.skip("this kernel does not reset the peak of the resident set")
    held = torch.ones(48 * MIB // 4)
    del held, before
    assert growth.growth_bytes == pytest.approx(48 * MIB, abs=12 * MIB)


def test_without_the_kernels_help_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr("lightning_memfit.bench.step_clock._CLEAR", tmp_path / "missing" / "clear_refs")
    growth = ResidentGrowth()
    growth.start()
    assert growth.growth_bytes is None
