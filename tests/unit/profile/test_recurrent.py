import pytest
import torch
from torch import nn

from lightning_memfit.profile.patches import UnknownKernelError, refuse_fused_recurrence
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import TraceError, trace_step

from .modules import Classifier, peak, really_run, trace_cpu


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
    assert peak(trace_cpu(module, BATCH, options).events) == peak(really_run(module, BATCH, options))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_on_cuda_trained_recurrence_is_refused(kind):
    with pytest.raises(TraceError, match=r"can't be traced for CUDA.*known to the device only"):
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


def test_the_names_that_are_replaced_still_exist():
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"):
        assert callable(getattr(torch._VF, name))
        assert name not in vars(torch._VF)
    assert torch.ops.aten.mkldnn_rnn_layer.default
