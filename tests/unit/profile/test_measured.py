import random

import pytest
import torch
from torch import nn

from lightning_memfit.memory import Category
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.measured import measure_step
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation

from .modules import Classifier, LanguageModel, batch, ids, peak, tiny_gpt2, trace_cpu


class Regularized(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Dropout(0.2), nn.Linear(128, 64))


@pytest.mark.parametrize(
    ("module", "data", "options"),
    [
        (Regularized, batch, StepOptions("32-true", 2, 1.0)),
        (lambda: LanguageModel(tiny_gpt2()), ids, StepOptions()),
    ],
    ids=["MLP", "GPT-2"],
)
def test_measurement_and_trace_agree(module, data, options):
    module = module()
    measured, traced = measure_step(module, data(), options), trace_cpu(module, data(), options)
    assert measured.measured
    assert peak(measured.events) == pytest.approx(peak(traced.events), rel=1e-3)
    assert measured.parameters == traced.parameters
    assert measured.flops == traced.flops
    last = len(measured.events) - 1
    for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.BUFFER):
        of_trace = traced.events.breakdown_at(len(traced.events) - 1).get(category)
        assert measured.events.breakdown_at(last).get(category) == of_trace


def test_module_batch_and_random_state_are_left_alone():
    module, data = Regularized(), batch()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    before, labels, state = torch.get_rng_state(), data["y"].clone(), random.getstate()
    measure_step(module, data)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == state
    assert torch.equal(data["y"], labels)
    assert module._trainer is None
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_a_measurement_knows_its_own_size_only():
    measured = measure_step(Classifier(), batch())
    with pytest.raises(ValueError, match="measured, not traced"):
        measured.events_at(2)


def test_a_plain_model_with_an_optimizer_factory():
    def make_optimizer(module):
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    model, data = tiny_gpt2(), {"input_ids": ids(), "labels": ids()}
    measured = measure_step(model, data, make_optimizer=make_optimizer)
    traced = profile_module(
        model, data, emulation=Emulation("cpu"), make_optimizer=make_optimizer, any_micro_batch=False
    )
    assert peak(measured.events) == pytest.approx(peak(traced.events), rel=1e-3)
    assert measured.optimizer == traced.optimizer == "SGD"
    assert (measured.sequence_length, measured.micro_batch_size) == (16, 4)
