import re

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.memory import Category
from lightning_memfit.memory.flops import grouped_product_flops
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.events import CATEGORIES
from lightning_memfit.profile.fake_mode import TracingFakeMode
from lightning_memfit.profile.integers import RealIntegers
from lightning_memfit.profile.patches import (
    UnknownKernelError,
    give_kernels,
    readable_fakes,
    refuse_fused_recurrence,
)
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from tests.truth.profile.modules import trace_step

from .modules import Classifier, faked, peak, really_run, trace_cpu


class Recurrent(Classifier):
    def __init__(self, kind=nn.LSTM, trained=True, **settings):
        super().__init__()
        self.trained = trained
        self.layer = kind(12, 24, batch_first=True, **settings)
        self.out = nn.LazyLinear(3)
        self.out(torch.zeros(1, 48 if settings.get("bidirectional") else 24))

    def training_step(self, batch, batch_idx):
        with torch.set_grad_enabled(self.trained):
            hidden, _ = self.layer(batch)
        return self.out(hidden[:, -1]).square().mean()


BATCH = torch.randn(4, 10, 12)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "32-true"),
        ({"num_layers": 2, "dropout": 0.1, "bidirectional": True}, "32-true"),
        ({}, "bf16-mixed"),
        ({"kind": nn.GRU}, "32-true"),
        ({"kind": nn.RNN}, "32-true"),
        ({"trained": False}, "32-true"),
    ],
)
def test_on_the_cpu_the_figure_is_that_of_a_real_run(settings, precision):
    torch.manual_seed(0)
    module, options = Recurrent(**settings), StepOptions(precision)
    try:
        measured = peak(really_run(module, BATCH, options))
    except RuntimeError as error:  # oneDNN has no recurrent layer in bf16 below AVX-512, so that such a step can't run
        with pytest.raises(TraceError, match=re.escape(str(error).split(".")[0])):
            trace_cpu(module, BATCH, options)
    else:
        assert peak(trace_cpu(module, BATCH, options).events) == measured


class Packed(Recurrent):
    """Recurrence over sequences of their real lengths, as in pytorch-forecasting's DeepAR."""

    def training_step(self, batch, batch_idx):
        series, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(series, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=12)
        return self.out(hidden).square().mean()


@pytest.mark.parametrize("settings", [{}, {"kind": nn.GRU, "num_layers": 2, "bidirectional": True}])
def test_packed_sequences_have_their_real_lengths(settings):
    module, batch = Packed(**settings), (BATCH, torch.tensor([10, 3, 7, 3]))
    traced, measured = trace_cpu(module, batch=batch).events, really_run(module, batch=batch)
    assert peak(traced) == pytest.approx(peak(measured), rel=1e-3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_on_cuda_trained_recurrence_is_refused(kind):
    with pytest.raises(TraceError, match=r"can't be traced.*known to the device only"):
        trace_step(Recurrent(kind), BATCH, StepOptions())


def test_on_cuda_recurrence_without_gradients_is_traced():
    assert len(trace_step(Recurrent(trained=False), BATCH, StepOptions()).events) > 0


@pytest.mark.parametrize("cell", [nn.LSTMCell(3, 4), nn.GRUCell(3, 4)])
def test_cells_are_refused_as_well(cell):
    with refuse_fused_recurrence():
        with pytest.raises(UnknownKernelError, match="_cell"):
            cell(torch.zeros(2, 3))
        with torch.no_grad():
            cell(torch.zeros(2, 3))
    cell(torch.zeros(2, 3))


WEIGHTS = 4 * (64 * 64 * 4)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))

    def forward(self, x):
        return type("Output", (), {"loss": self.layers(x).square().mean()})


def scratch_in_step(device, foreach=None):
    def make_optimizer(module):
        return torch.optim.AdamW(module.parameters(), foreach=foreach)

    events = profile_module(
        Model(), {"x": torch.zeros(2, 64)}, emulation=Emulation(device), make_optimizer=make_optimizer
    ).events
    start = next(at for at, name in reversed(events.phases) if name == "step")
    temporary = CATEGORIES.index(Category.TEMPORARY)
    signed = (torch.tensor(events.events).sign() * torch.tensor(events.sizes[events.storages])).numpy()
    signed[events.categories[events.storages] != temporary] = 0
    live = signed.cumsum()
    return int(live[start:].max() - live[start])


@pytest.mark.parametrize("foreach", [None, True])
def test_adamw_on_cuda_needs_scratch_memory_of_all_weights(foreach):
    assert scratch_in_step("cuda", foreach) > 0.9 * WEIGHTS


def test_foreach_off_and_cpu_step_one_parameter_at_a_time():
    assert scratch_in_step("cuda", False) < 0.6 * WEIGHTS
    assert scratch_in_step("cpu") < 0.6 * WEIGHTS


@pytest.fixture
def integers():
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode)
    with fake_mode, integers, readable_fakes(integers):
        yield integers


IDS = torch.tensor([4, 1])


def test_integers_are_read_as_they_are(integers):
    fake = faked(integers, IDS)
    assert fake.numpy().tolist() == [4, 1]
    assert np.asarray(fake).max() == 4
    assert fake.cpu().detach().numpy().dtype == np.int64
    assert integers.assumptions == []


def test_what_numpy_changes_stays_in_numpy(integers):
    fake = faked(integers, IDS)
    fake.numpy()[0] = 99
    assert fake.tolist() == [4, 1]


def test_a_tensor_with_gradient_must_be_detached(integers):
    x = torch.randn(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="detach"):
        x.numpy()
    assert x.detach().numpy().shape == (2,)


def test_tensors_are_made_of_tensors(integers):
    norms = [torch.randn(3).norm(), torch.randn(3).norm()]
    assert torch.tensor(norms).shape == (2,)
    assert torch.as_tensor([norms, norms]).shape == (2, 2)
    ids = faked(integers, IDS)
    assert torch.tensor([ids[0], ids[1], 7]).shape == (3,)
    assert torch.tensor([1.0, 2.0]).dtype is torch.float32


# --- addresses and grouped products -----------------------------------------------------------------------------------


def test_addresses_tell_which_tensors_share_memory(fakes):
    x = torch.randn(4, 8)
    assert x.data_ptr() == x.view(-1).data_ptr() == x.untyped_storage().data_ptr()
    assert x[1].data_ptr() > x.data_ptr()
    assert (x.data_ptr() % 16, x[1].data_ptr() % 64) == (0, 32)
    assert len({value.data_ptr() for value in (x, x[0], x.clone())}) == 2


@pytest.fixture
def fakes():
    fake_mode = TracingFakeMode()
    integers = RealIntegers(fake_mode)
    with fake_mode, integers, readable_fakes(integers):
        yield


def test_addresses_of_real_tensors_stay_numbers(fakes):
    with _disable_current_modes():
        assert isinstance(torch.ones(1).untyped_storage().data_ptr(), int)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_the_real_kernel(dtype):
    ends = torch.tensor([2, 6, 8], dtype=torch.int32)
    shapes = [((8, 16), (3, 16, 32)), ((16, 8), (8, 32)), ((3, 8, 16), (16, 8))]

    def products():
        found = []
        for left, right in shapes:
            x, w = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
            found.append(torch._grouped_mm(x, w, ends if x.dim() + w.dim() < 6 else None))
        return [(tuple(y.shape), y.stride(), y.dtype) for y in found]

    fake_mode = TracingFakeMode()
    give_kernels(fake_mode, cuda=False)
    real = products()
    with fake_mode:
        assert products() == real
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            torch._grouped_mm(torch.randn(8, 15, dtype=dtype), torch.randn(3, 15, 32, dtype=dtype), ends)
    assert grouped_product_flops(torch.ones(8, 16), torch.ones(3, 16, 32), out_val=torch.ones(8, 32)) == 2 * 8 * 16 * 32
    assert grouped_product_flops(torch.ones(16, 8), torch.ones(8, 32), out_val=torch.ones(3, 16, 32)) == 2 * 8 * 16 * 32
