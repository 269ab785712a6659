import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.profile import process
from lightning_memfit.profile.fake_mode import TracingFakeMode
from tests.helpers.modules import LanguageModel

from .modules import ids, tiny_gpt2, trace_cpu


class Keys(TracingFakeMode):
    """Keeps its keys beside torch's."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.own = True

    def _cache_key(self, state, func, args, kwargs):
        theirs = FakeTensorMode._cache_key(self, state, func, args, kwargs)
        own = super()._cache_key(state, func, args, kwargs)
        self.found.append((own, theirs))
        return own


def like(tensor):
    """Tensors that differ from one in a property each."""
    rows, columns = tensor.shape
    with torch.inference_mode():
        inference = torch.empty(rows, columns)
    return [
        torch.empty(rows, columns),
        torch.empty(columns, rows),
        torch.empty(columns, rows).t(),
        torch.empty(rows + 1, columns)[1:],
        torch.empty(rows + 1, columns)[:rows],
        torch.empty(rows, columns, dtype=torch.half),
        torch.empty(rows, columns, requires_grad=True),
        torch.nn.Parameter(torch.empty(rows, columns)),
        torch.empty(rows, columns, dtype=torch.cfloat),
        torch.empty(rows, columns, dtype=torch.cfloat).conj(),
        torch.empty(rows, columns, dtype=torch.cfloat).conj().imag,
        inference,
    ]


def call_operators():
    square = torch.empty(4, 4)
    for tensor in like(torch.empty(4, 6)):
        tensor.abs()
        tensor.sum()
        torch.stack([tensor, tensor])
        torch.ones_like(tensor)
    for number in (1, 1.0, True, 2, 2.0):
        torch.full((2,), number)
        square.add(number)
        torch.ones(2, dtype=torch.int64).mul(number)
    for dim in (0, 1, -1, (0, 1), None):
        square.sum(dim)
        square.sum(dim, keepdim=True)
        square.sum(dim, dtype=torch.float64)
    square.add_(1)
    square.addmm(square, square, alpha=2)
    square.addmm(square, square, beta=2)
    torch.cat([square, square])
    torch.cat([square, square], 1)
    torch.cat([square, square, square])
    torch.empty(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).relu()
    torch.empty(2, 3, 4, 4).relu()
    square.expand(2, 4, 4)
    square.as_strided((2, 2), (1, 2), 1)
    square.split(2)
    square.max(0)


def test_keys_tell_apart_and_take_together_what_torch_s_do():
    with Keys() as mode:
        call_operators()
        call_operators()
    by_theirs, by_own = {}, {}
    for own, theirs in mode.found:
        assert by_theirs.setdefault(theirs, own) == own
        assert by_own.setdefault(own, theirs) == theirs
    assert all(own != theirs for own, theirs in mode.found)  # none of these calls needed torch's
    assert len(mode.found) > len(by_own) > 80


def test_calls_on_what_is_not_plain_are_left_to_torch():
    with TracingFakeMode() as mode, torch.inference_mode(False):
        others = FakeTensorMode().from_tensor(torch.empty(2)), torch.empty(2, 2).to_sparse_csr(), object()
        constant = torch.tensor(3.0)
        assert constant.constant is not None
        for one in (constant, *others, [constant], {"by": "name"}, 1j):
            assert not mode._describe([], (1, one))


@pytest.fixture
def crosschecked(monkeypatch):
    """Operators whose known result torch has compared with that of its kernel."""
    operators = []
    check = FakeTensorMode._crosscheck_cache_output

    def noted(self, output, func, *rest):
        operators.append(func)
        return check(self, output, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "_crosscheck_cache_output", noted)
    monkeypatch.setattr(process, "_BROUGHT", [(lambda: list(map(str, operators)), operators.extend)])
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):  # monkeypatch would leave it hidden
        yield operators


def test_known_results_are_those_of_the_kernels(crosschecked):
    trace_cpu(LanguageModel(tiny_gpt2()), ids())
    assert len(set(crosschecked)) > 20
