"""Adapters on weights that two ranks divide: trained, saved alone and resumed as under DDP."""

from pathlib import Path

import pytest

from tests.helpers.strategy_launch import launch

pytest.importorskip("deepspeed")

SCENARIOS = "tests.helpers.strategy_scenarios"
LORA = [{"class_path": "lightning_memfit.techniques.lora.Lora", "init_args": {"rank": 4}}]
STRATEGIES = ("memfit_fsdp2", "memfit_zero_2", "memfit_zero_3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def results(folder):
    cases = {}
    for strategy in ("ddp", *STRATEGIES):
        (folder / strategy).mkdir()
        own = {"strategy": strategy, "devices": 2, "callbacks": LORA, "folder": str(folder / strategy)}
        cases |= {f"{strategy}/{name}": own | {"scenario": f"{SCENARIOS}.{name}"} for name in ("save", "resume")}
    return launch(folder, cases)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_and_resumes_as_under_ddp(results, strategy):
    saved, expected = results[f"{strategy}/save"], results["ddp/save"]
    assert saved["whole"] == pytest.approx(expected["whole"], abs=2e-6, rel=0)
    assert saved["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-6, rel=0)
    assert results[f"{strategy}/resume"]["losses"] == pytest.approx(results["ddp/resume"]["losses"], abs=2e-6, rel=0)


def test_checkpoints_hold_adapters_alone(results, folder: Path):
    """Numbers of parameters, adapters' states included, are in files of DeepSpeed whose size is mostly their own."""
    sizes = {
        strategy: sum(file.stat().st_size for file in (folder / strategy / "half.ckpt").rglob("*"))
        for strategy in STRATEGIES
    }
    assert sizes["memfit_fsdp2"] < 400_000
    assert sizes["memfit_zero_3"] < 400_000
