"""Rows of the estimator benchmark: the predicted peak beside the allocation events of torch's profiler."""

import pytest
import torch

from benchmarks.estimator.cases import Case, build_batch, build_callbacks, build_module, cpu_cases
from benchmarks.estimator.run import measure_cpu
from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation

QUICK = [
    Case("mlp", 64),
    Case("gpt2-2x128", 4, 64, "bf16-mixed"),
    Case("gpt2-6x192", 4, 64, optimizer="adamw_8bit", checkpointing=True),
    Case("gpt2-2x128", 4, 64, accumulate_grad_batches=4),
    Case("resnet", 8),
]
THOROUGH = [case for case in cpu_cases() if case.model in ("llama-8x256", "bert-8x256", "t5-4x256", "vit-8x192")]


@pytest.fixture(autouse=True)
def one_thread():
    """Convolutions and matrix products take scratch memory by thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(case: Case) -> None:
    module = build_module(case, "meta")
    options = StepOptions(case.precision, case.accumulate_grad_batches)
    profile = profile_module(
        module, build_batch(case), options, Emulation("cpu"), build_callbacks(case), any_micro_batch=False
    )
    error = estimate_step(profile).allocated_bytes / measure_cpu(case)["allocated_bytes"] - 1
    assert abs(error) <= 0.01, f"{case.name}: {error:+.3%}"


@pytest.mark.nightly_cases("gpt2-6x192", "resnet")
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_the_peak_of_real_runs_is_predicted(case):
    compare(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", THOROUGH[::3], ids=lambda case: case.name)
def test_the_peak_of_more_real_runs_is_predicted(case):
    compare(case)
