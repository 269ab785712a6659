import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.checkpointing import offload
from lightning_memfit.checkpointing.apply import apply_checkpointing
from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.checkpointing.offload import OffloadPool
from lightning_memfit.memory.ledger import StorageLedger
from tests.contract.checkpointing.models import EVERY_MODEL, gpt2, loss_of, make

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def move_everything(monkeypatch):
    monkeypatch.setattr(OffloadPool.__init__, "__defaults__", (1,))


def gradients(model, batch):
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), torch.get_rng_state(), {n: p.grad.clone() for n, p in model.named_parameters()}


def blocks_of(model):
    return [block for group in find_blocks(model) for block in group.modules]


def offload_all(model):
    blocks = blocks_of(model)
    return apply_checkpointing(blocks, ["offload"] * len(blocks))


def assert_equal(ours, plain):
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    assert all(torch.equal(ours[2][name], plain[2][name]) for name in plain[2])


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_gradients_and_random_state_are_bitwise_those_of_the_plain_run(name):
    model, batch = make(name)
    plain = gradients(copy.deepcopy(model), batch)
    applied = offload_all(model)
    copied = copy.deepcopy(model)
    assert_equal(gradients(model, batch), plain)
    assert_equal(gradients(copied, batch), plain)
    applied.remove()
    assert not any("forward" in vars(module) for module in model.modules())


class Block(nn.Module):
    """Saves its input twice, once as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.saved = []

    def forward(self, x):
        hidden = self.inner(x).exp()
        self.saved.append(weakref.ref(hidden.untyped_storage()))
        return hidden[:4].sin().sum() + hidden.cos() * hidden.t().sum()


def counted(monkeypatch):
    """Data pointer and number of elements of every storage that is copied to the host."""
    copies = []
    original = offload._HostCopy._copy_out

    def count(self, flat):
        copies.append((flat.data_ptr(), flat.numel()))
        return original(self, flat)

    monkeypatch.setattr(offload._HostCopy, "_copy_out", count)
    return copies


def test_storages_leave_one_block_later():
    blocks = [Block() for _ in range(3)]
    x = torch.randn(8, 8, requires_grad=True)
    apply_checkpointing(blocks, ["offload"] * 3)
    alive = []
    for block in blocks:
        x = block(x)
        gc.collect()
        alive.append([other.saved[0]() is not None for other in blocks if other.saved])
    assert alive == [[True], [False, True], [False, False, True]]
    x.sum().backward()


def test_views_share_one_copy(monkeypatch):
    copies = counted(monkeypatch)
    block = Block()
    apply_checkpointing([block], ["offload"])
    block(torch.randn(8, 8, requires_grad=True)).sum().backward()
    # input, exp with two views, its cosine: nothing else has 64 elements, and the weight stays
    assert sum(size == 64 for _, size in copies) == len({place for place, size in copies if size == 64}) <= 4


class Complex(nn.Module):
    """Saves tensors and what is conjugated or negated of them lazily, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.cdouble)

    def forward(self, x):
        y = self.inner(x)
        return x + y * y.conj() + torch.complex(y.imag * y.conj().imag, y.real)


class Recurrent(nn.Module):
    """On the CPU its parts lie in one memory, and torch counts changes of each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8, dtype=torch.double)

    def forward(self, x):
        return x + self.inner(x)[0]


class Graph(nn.Module):
    """Has a buffer without a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.double)
        self.register_buffer("edges", torch.eye(8, dtype=torch.double).to_sparse())

    def forward(self, x):
        return x + torch.sparse.mm(self.edges, self.inner(x)).sin()


@pytest.mark.parametrize("block", [Complex, Recurrent, Graph])
def test_what_shares_memory_keeps_its_values(block):
    torch.manual_seed(0)
    blocks = nn.Sequential(block(), block())
    x = torch.randn(8, 8, dtype=next(blocks.parameters()).dtype)

    def run():
        return torch.autograd.grad(blocks(x).abs().square().sum(), list(blocks.parameters()))

    plain = run()
    apply_checkpointing(list(blocks), ["offload"] * 2)
    assert all(torch.equal(a, b) for a, b in zip(run(), plain, strict=True))


def test_parameters_and_small_tensors_stay(monkeypatch):
    model, batch = make("gpt2")
    copies = counted(monkeypatch)
    offload_all(model)
    loss_of(model, batch)
    parameters = {p.data_ptr() for p in model.parameters()}
    assert copies
    assert not parameters & {place for place, _ in copies}
    copies.clear()
    for block in blocks_of(model):
        block.forward.pool.min_bytes = 1 << 30
    loss_of(model, batch).backward()
    assert not copies


def test_changes_in_place_are_noticed():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.inner(x)
            result = hidden.sin()
            hidden.add_(1)
            return result

    block = Changing()
    apply_checkpointing([block], ["offload"])
    with pytest.raises(RuntimeError, match="changed in place"):
        block(torch.randn(4, 8)).sum().backward()


class FakeStream:
    """Notes which stream waits for what, and whether some memory is still held at that time."""

    def __init__(self):
        self.waits = []
        self.memory = None

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        self.waits.append((event, self.memory is not None and self.memory() is not None))

    def record_event(self):
        return "copied"


@pytest.mark.parametrize("is_used", [False, True])
def test_memory_that_is_being_filled_is_released_after_its_copy(is_used, monkeypatch):
    """D's backward requests the last block of G, whose graph is dropped without a backward pass."""
    main = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    host_copy = offload._HostCopy(torch.arange(64.0), None)
    host_copy._stream = FakeStream()
    host_copy.add_view()
    host_copy.leave()
    host_copy.request()
    main.memory = weakref.ref(host_copy._on_device)
    assert not main.waits
    if is_used:
        torch.testing.assert_close(host_copy.use(), torch.arange(64.0))
    del host_copy
    assert main.waits == [("copied", True)]
    assert main.memory() is None


def test_a_trace_sees_what_the_device_holds():
    """On fake tensors the host side takes no memory: what is alive after forward is little more than one block's."""
    peaks = {}
    for choice in ("none", "offload"):
        with FakeTensorMode(), StorageLedger() as ledger:
            model = gpt2(n_layer=8)
            start = ledger.live_bytes
            apply_checkpointing(blocks_of(model), [choice] * 8)
            ids = torch.ones(2, 16, dtype=torch.long)
            loss = model(input_ids=ids, labels=ids).loss
            peaks[choice] = ledger.live_bytes - start
            loss.backward()
    assert peaks["offload"] < 0.3 * peaks["none"]


def recompute_all(model, choice="offload_inputs"):
    blocks = blocks_of(model)
    return apply_checkpointing(blocks, [choice] * len(blocks))


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_inputs_of_recomputed_blocks_on_the_host_change_no_number(name, monkeypatch):
    model, batch = make(name)
    plain = gradients(copy.deepcopy(model), batch)
    copies = counted(monkeypatch)
    recompute_all(model)
    assert_equal(gradients(model, batch), plain)
    assert len(copies) >= len(blocks_of(model))


@pytest.mark.gpu
@needs_cuda
def test_cuda_gradients_are_bitwise_equal_and_memory_leaves():
    sizes = {"n_layer": 12, "n_embd": 512, "n_head": 8, "n_positions": 256}
    ids = torch.randint(0, 64, (8, 256), device="cuda")
    results, peaks = {}, {}
    for choice in ("none", "offload"):
        torch.manual_seed(0)
        model = gpt2(**sizes).cuda().train()
        apply_checkpointing(blocks_of(model), [choice] * 12)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            results[choice] = gradients(model, {"input_ids": ids, "labels": ids})
            peaks[choice] = torch.cuda.max_memory_allocated()
        del model
    assert_equal(results["offload"], results["none"])
    assert peaks["offload"] < 0.6 * peaks["none"]
