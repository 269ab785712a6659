from dataclasses import replace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.memory import Category
from lightning_memfit.memory.cache_files import write_file
from lightning_memfit.profile import process, trace
from lightning_memfit.profile.build import batch_size, measure_step, profile_module, resize_batch, sequence_length
from lightning_memfit.profile.record import Growth, ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.helpers.modules import LanguageModel

from .modules import WIDTH, Classifier, batch, ids, peak, same_events, tiny_gpt2, trace_cpu
from .test_trace import Bag, Opaque, TakesAny, ragged


@pytest.mark.nightly
def test_every_size_follows_from_two():
    module, options = LanguageModel(tiny_gpt2()), StepOptions("bf16-mixed")
    profile = profile_module(module, ids(2), options, Emulation("cpu"))
    assert (profile.micro_batch_size, profile.only_this_size) == (2, "")
    for samples in (1, 2, 7):
        followed, traced = profile.events_at(samples), trace_cpu(module, ids(samples), options).events
        tolerance = 1e-5 if samples > 1 else 1e-3
        assert peak(without_scratch(followed)) == pytest.approx(peak(without_scratch(traced)), rel=tolerance)
        # Kernels that work in tiles of 16 rows (AMX) take scratch in steps, which no two sizes tell.
        tiles = largest_scratch(traced) if torch.cpu._is_amx_tile_supported() else 0
        assert peak(followed) == pytest.approx(peak(traced), rel=tolerance, abs=tiles)


def scratch(events):
    """Which storages are memory of a kernel beside its results."""
    return [events.site_names[site].endswith("kernel scratch") for site in events.sites]


def without_scratch(events):
    return replace(events, sizes=np.where(scratch(events), 0, events.sizes))


def largest_scratch(events):
    return int(np.where(scratch(events), events.sizes, 0).max())


def test_what_a_profile_tells():
    profile = profile_module(Classifier(), batch(), any_micro_batch=False)
    assert (profile.name, profile.optimizer, profile.device, profile.measured) == ("Classifier", "AdamW", "cuda", False)
    assert profile.num_parameters == sum(p.numel() for p in Classifier().parameters())
    assert profile.flops["backward"] > profile.flops["forward"] > 0
    assert {"torch", "lightning", "transformers"} <= set(profile.versions)
    with pytest.raises(ValueError, match="at one size"):
        profile.events_at(2)


class OfOneSize(Classifier):
    """Works with the batch it was built for only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(32, 1))

    def training_step(self, batch, batch_idx):
        return self.loss({"x": batch["x"] * self.weights, "y": batch["y"]})


class GrowsInSteps(Classifier):
    """Another structure where a sample more comes in."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + self.net(batch["x"]).mean() if len(batch["x"]) % 2 else loss


@pytest.mark.parametrize(
    ("module", "data", "reason"),
    [
        (OfOneSize, batch, "broadcast a dimension of length 32"),
        (GrowsInSteps, batch, "does not allocate in the same order at micro-batch sizes 32 and 33"),
        (Bag, ragged, r"differ in their first dimension \(14 and 4\)"),
        (TakesAny, lambda: Opaque(**batch()), "Opaque holds tensors where they can't be resized"),
    ],
)
def test_where_one_size_is_known_only_the_profile_says_why(module, data, reason):
    profile = profile_module(module(), data(), emulation=Emulation("cpu"))
    assert peak(profile.events) > 0
    assert profile.slopes is None
    with pytest.raises(ValueError, match=f"known at .* only .*{reason}"):
        profile.events_at(3)


def test_batches_are_repeated_and_cut():
    small = resize_batch({"x": torch.arange(6).view(3, 2), "scalar": torch.tensor(1), "one": torch.ones(1, 5)}, 3, 2)
    assert small["x"].tolist() == [[0, 1], [2, 3]]
    assert small["one"].shape == (1, 5)
    assert resize_batch((torch.arange(2),), 2, 5)[0].tolist() == [0, 1, 0, 1, 0]
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2, WIDTH), torch.zeros(1, WIDTH)])
    with pytest.raises(ValueError, match=r"first dimension|can't be resized"):
        resize_batch(packed, 3, 4)


def test_sizes_of_batches():
    assert batch_size({"temperature": torch.tensor(1.0), "x": torch.zeros(5, 2)}) == 5
    assert sequence_length({"input_ids": torch.zeros(2, 9)}) == 9
    assert sequence_length(torch.zeros(2, 9)) is None
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        batch_size({"scalar": torch.tensor(1)})


class OneIsAnother(Classifier):
    """A batch of one takes another way, as the layouts of its tensors often do."""

    def training_step(self, batch, batch_idx):
        x = batch["x"] if len(batch["x"]) == 1 else batch["x"].sin()
        return self.loss({"x": x, "y": batch["y"]})


def samples(count):
    return {"x": torch.ones(count, WIDTH), "y": torch.zeros(count, dtype=torch.long)}


def test_from_a_batch_of_one_every_size_is_had_exactly(tmp_path):
    profile = profile_module(OneIsAnother(), samples(1), emulation=Emulation("cpu"))
    assert (profile.micro_batch_size, profile.slopes, profile.knows_every_size) == (1, None, True)
    assert profile.only_this_size == ""
    write_file(tmp_path / "profile.npz", profile.write)
    for known in (profile, ModelProfile.load(tmp_path / "profile.npz")):
        for count in (1, 2, 7):
            traced = trace_cpu(OneIsAnother(), samples(count)).events
            assert same_events(known.events_at(count), traced)


class Contrastive(Classifier):
    """Compares all samples with each other, and all triplets of them."""

    def training_step(self, batch, batch_idx):
        distances = torch.cdist(*2 * [self.net(batch["x"])])
        triplets = distances.unsqueeze(2) - distances.unsqueeze(1)
        return F.cross_entropy(-distances, torch.arange(len(distances))) + triplets.relu().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 3])
def test_memory_that_grows_faster_than_the_batch_is_followed(count, tmp_path):
    """The line through two sizes gave a hundredth of what a batch of 128 takes."""
    profile = profile_module(Contrastive(), samples(count), emulation=Emulation("cpu"))
    write_file(tmp_path / "profile.npz", profile.write)
    for known in (profile, ModelProfile.load(tmp_path / "profile.npz")):
        predicted = without_scratch(known.events_at(128))
        assert peak(predicted) == peak(without_scratch(trace_cpu(Contrastive(), samples(128)).events))
    grown = replace(profile, growth=Growth(100, 2)).after(12)
    assert peak(grown.events_at(count + 4)) == peak(profile.events_at(count + 4)) + 10 * 100


def test_where_two_and_three_differ_a_batch_of_one_says_nothing_of_them():
    profile = profile_module(GrowsInSteps(), samples(1), emulation=Emulation("cpu"))
    assert not profile.knows_every_size
    with pytest.raises(ValueError, match="sizes 2 and 3"):
        profile.events_at(2)


class ReadsItsLoss(Classifier):
    """Reads a float, which has to be assumed."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if loss.item() < 10.0 else loss * 1.0


def test_assumptions_are_checked_at_one_size(monkeypatch):
    traces = []
    monkeypatch.setattr(trace, "_attempt", lambda *rest, run=trace._attempt: traces.append(1) or run(*rest))
    profile = profile_module(ReadsItsLoss(), batch(), emulation=Emulation("cpu"))
    assert profile.assumptions
    assert profile.knows_every_size
    assert len(traces) == len(trace._CHOICES) + 1


class RefusesTheFirst(Classifier):
    """Ends in an error of its own with the value that is assumed first."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        assert loss.item() > 10.0
        return loss


def test_other_sizes_assume_what_the_batch_s_own_did(monkeypatch):
    traces = []
    monkeypatch.setattr(trace, "_attempt", lambda *rest, run=trace._attempt: traces.append(1) or run(*rest))
    profile = profile_module(RefusesTheFirst(), batch(), emulation=Emulation("cpu"))
    assert profile.knows_every_size
    assert len(traces) == len(trace._CHOICES) + 1


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


@pytest.mark.nightly
def test_a_budget_planned_inside_a_measured_step_does_not_count(monkeypatch):
    found, resolve = [], ActivationCheckpointing._resolve

    def kept(callback, *arguments):
        resolve(callback, *arguments)
        found.append(callback.resolved.plan.choices)

    monkeypatch.setattr(ActivationCheckpointing, "_resolve", kept)
    monkeypatch.setattr(process, "_BROUGHT", [*process._BROUGHT, (lambda: found, found.extend)])
    module = LanguageModel(tiny_gpt2(n_layer=4))
    measured = measure_step(module, ids(8, 32), callbacks=(ActivationCheckpointing(budget="40%"),))
    choices = found[0]
    alone = measure_step(module, ids(8, 32), callbacks=(ActivationCheckpointing(choices=choices),))
    assert estimate_step(measured).allocated_bytes == estimate_step(alone).allocated_bytes


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


class SparseGraph(Classifier):
    def __init__(self, layout):
        super().__init__()
        self.register_buffer("graph", torch.eye(64).to_sparse(layout=layout))

    def training_step(self, batch, batch_idx):
        return self.loss({"x": torch.sparse.mm(self.graph, batch["x"]), "y": batch["y"]})


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_and_batches_are_not_traced_as_dense_ones(layout):
    rows = {"x": torch.randn(64, 64), "y": torch.zeros(64, dtype=torch.long)}
    with pytest.raises(TraceError, match=rf"{layout} don't tell.*`measure_step`"):
        trace_cpu(SparseGraph(layout), rows)
    with pytest.raises(TraceError, match=rf"{layout} don't tell.*`measure_step`"):
        trace_cpu(Classifier(), {**rows, "graph": torch.eye(64).to_sparse(layout=layout)})


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


class WritesLate(Classifier):
    """Does at the hundredth batch what no first steps do."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if (batch_idx + 1) % 100 == 0:
            torch.save(self.state_dict(), "checkpoint.pt")
        return loss


def test_a_step_at_another_number_is_traced_on_request():
    def profiled(module, batch_idx=None):
        options = StepOptions(batch_idx=batch_idx)
        found = profile_module(module, batch(), options, Emulation("cpu"), any_micro_batch=False)
        return estimate_step(found).allocated_bytes

    assert profiled(WritesLate()) == profiled(Classifier()) == profiled(WritesLate(), 98)
    with pytest.raises(TraceError, match=r"it would write to 'checkpoint\.pt' at .*test_build"):
        profiled(WritesLate(), 99)
