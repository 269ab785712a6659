import random

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memfit.memory import Category
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError

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


class SparseEmbedding(Classifier):
    def __init__(self):
        super().__init__()
        self.ids = nn.Embedding(1000, 64, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.loss({"x": self.ids(batch), "y": batch % 10})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_are_measured_and_not_traced():
    rows = torch.arange(200)
    with pytest.raises(TraceError, match=r"sparse_coo don't tell.*`measure_step`"):
        trace_cpu(SparseEmbedding(), rows)
    measured = measure_step(SparseEmbedding(), rows)
    end = measured.events.breakdown_at(len(measured.events) - 1)
    dense = sum(p.numel() for p in Classifier().parameters()) * 4
    sparse = rows.numel() * (8 + 64 * 4)  # an index and a row each, where the weight has 1000 rows
    assert end.get(Category.GRADIENT) == dense + sparse


class AsksItsDataModule(Classifier):
    def setup(self, stage):
        self.head = nn.Linear(64, self.trainer.datamodule.num_classes)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.trainer.datamodule.scale


class Data(pl.LightningDataModule):
    scale, num_classes = 2.0, 10

    def hook(self, *_):
        raise AssertionError("the loader has run these hooks already")

    prepare_data = setup = teardown = on_after_batch_transfer = on_exception = hook


def test_a_module_may_ask_its_data_module():
    module = AsksItsDataModule()
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module.trainer.datamodule = Data()
    measured, traced = measure_step(module, batch()), trace_cpu(module, batch())
    assert peak(measured.events) == pytest.approx(peak(traced.events), rel=1e-3)
    assert type(module.trainer.datamodule) is Data
    with pytest.raises(TraceError, match="KeyError"):
        trace_cpu(module, {})
