"""Prediction against measurement on the CPU."""

from typing import Any

import pytest
import torch

from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.course import TraceLimits
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from tests.contract.runs import LanguageModel


def assert_predicted_peak_is_measured(callbacks: list[Any], configure: Any = None, **options: Any) -> int:
    """Trace and measure two steps of a small GPT-2; return the measured peak in bytes."""
    config = {"n_embd": 128, "n_layer": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = LanguageModel(configure, **config)
    batch = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    arguments = {"options": StepOptions(**options), "callbacks": tuple(callbacks)}
    traced = profile_module(model, batch, emulation=Emulation(device="cpu"), any_micro_batch=False, **arguments)
    slow = TraceLimits(seconds=300.0)  # optimizers that are compiled wait for a compiler in other processes
    measured = predict_peak_bytes(measure_step(model, batch, limits=slow, **arguments), 4)
    assert predict_peak_bytes(traced, 4) == pytest.approx(measured, rel=0.03)
    return measured
