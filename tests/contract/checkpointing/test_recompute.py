"""Blocks whose forward changes state, draws random numbers or writes to its inputs, against plain torch."""

import contextvars
import copy
import itertools
import os
import queue
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.checkpointing.apply import apply_checkpointing
from lightning_memfit.checkpointing.check import InexactRecomputationError
from tests.zoo.blocks import (
    RARE,
    WIDTH,
    Batched,
    Block,
    Counter,
    GatedRecurrent,
    Net,
    Rare,
    plainly,
    reset,
    state_of,
)


def train(kind, change=lambda net: None, twice=False, num_steps=5):
    """Losses, gradients and state of steps, of which one is without gradients and in evaluation mode."""
    reset()
    net = Net(kind, twice)
    change(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    found = []
    for step in range(num_steps):
        if step == 3:
            with torch.no_grad():
                net.eval()(torch.ones(8, WIDTH))
            net.train()
        optimizer.zero_grad()
        loss = net(torch.randn(8, WIDTH)).square().mean()
        aux = [block.aux for block in net.blocks if getattr(block, "aux", None) is not None]
        (loss + sum(aux)).backward()
        found.append((loss.item(), [plainly(p.grad) if p.grad is not None else None for p in net.parameters()]))
        optimizer.step()
    return found, state_of(net)


def checkpointed(choice):
    return lambda net: apply_checkpointing(list(net.blocks), [choice] * 3)


QUEUE: queue.Queue = queue.Queue()
STEPS = itertools.cycle(range(2))


def from_the_environment():
    os.environ["MEMFIT_TEST_CALLS"] = str(int(os.environ["MEMFIT_TEST_CALLS"]) + 1)
    return 1 / int(os.environ["MEMFIT_TEST_CALLS"])


def from_an_iterator():
    return 0.5 + next(STEPS) / 10


class Calls:
    number = 0


def from_a_class():
    Calls.number += 1
    return 1 / Calls.number


class HiddenScalar(Block):
    """Scales its result by a number from where nobody looks: nothing that is saved for backward depends on it."""

    def forward(self, x):
        return x + self.inner(x) * self.draw()


class HiddenEnd(Block):
    """Ends with an operator or without it."""

    def forward(self, x):
        y = x + self.inner(x)
        return y * 1.5 if self.draw() > 0.55 else y


class HiddenBeginning(Block):
    """Draws first what only its end uses, so that a recomputation that ends early draws as well."""

    def forward(self, x):
        drawn = self.draw()
        return x + self.inner(x) * drawn


def start_anew(monkeypatch):
    monkeypatch.setenv("MEMFIT_TEST_CALLS", "0")
    monkeypatch.setitem(globals(), "STEPS", itertools.cycle(range(2)))
    monkeypatch.setattr(Calls, "number", 0)


ADVANCING = (from_the_environment, from_an_iterator, from_a_class)


@pytest.mark.parametrize("choice", ["full", "keep_matmul"])
@pytest.mark.parametrize("draw", ADVANCING)
@pytest.mark.parametrize("kind", [HiddenScalar, HiddenEnd, HiddenBeginning])
def test_hidden_numbers_that_advance_are_refused_before_a_weight_changes(draw, kind, choice, monkeypatch):
    start_anew(monkeypatch)
    before = Net(type(kind.__name__, (kind,), {"draw": staticmethod(draw)}))
    net = copy.deepcopy(before)
    apply_checkpointing(list(net.blocks), [choice] * 3)
    with pytest.raises(InexactRecomputationError, match=f"{kind.__name__} would not be exact"):
        net(torch.randn(8, WIDTH)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))


def test_calls_of_a_trace_are_not_taken_for_those_of_a_run(monkeypatch):
    start_anew(monkeypatch)
    net = Net(type("HiddenScalar", (HiddenScalar,), {"draw": staticmethod(from_a_class)}))
    apply_checkpointing(list(net.blocks), ["full"] * 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(3):
            net(torch.randn(8, WIDTH)).sum().backward()
    net.zero_grad(set_to_none=True)
    with pytest.raises(InexactRecomputationError, match="HiddenScalar would not be exact"):
        net(torch.randn(8, WIDTH)).sum().backward()


def test_weights_that_change_between_forward_and_backward_are_refused():
    net = Net(Block)
    apply_checkpointing(list(net.blocks), ["full"] * 3)
    loss = net(torch.randn(8, WIDTH)).sum()
    with torch.no_grad():
        net.blocks[1].inner.weight.add_(1)
    with pytest.raises(InexactRecomputationError, match="changed since its forward"):
        loss.backward()


def test_second_derivatives_and_graphs_that_are_kept():
    def second(net):
        x = torch.ones(8, WIDTH, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward(retain_graph=True)
        slope.sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    reset()
    plain = Net(Counter)
    ours = copy.deepcopy(plain)
    apply_checkpointing(list(ours.blocks), ["full"] * 3)
    assert all(torch.equal(a, b) for a, b in zip(second(ours), second(plain), strict=True))
    assert [b.count for b in ours.blocks] == [1, 1, 1]


# --- what no attribute of a module shows ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RARE)
def test_state_in_other_objects_is_refused(name):
    make, add = RARE[name]
    kind = type("RareOf", (Rare,), {"make": staticmethod(make), "add": staticmethod(add)})
    with pytest.raises(InexactRecomputationError, match="RareOf"):
        train(kind, checkpointed("full"))


GAIN = contextvars.ContextVar("gain", default=1.0)
LOCAL = threading.local()


class Surroundings(Block):
    """Multiplies by what lies around it."""

    def build(self):
        self.owner = lambda: None

    def forward(self, x):
        return self.inner(x * GAIN.get() * LOCAL.gain * getattr(self.owner(), "gain", 1.0)).sin()


def gradients_of(kind, change, checkpoint, num_calls=4):
    """Gradients of calls, all of which something changes between forward and backward."""
    torch.manual_seed(0)
    LOCAL.gain = 1.0
    net = Net(kind)
    net.blocks[0].owner = weakref.ref(net)
    checkpoint(net)
    for call in range(num_calls):
        net.zero_grad()
        change(net, torch.ones(8, WIDTH) / (1 + call)).backward()
    return [None if p.grad is None else p.grad.tolist() for p in net.parameters()]


def plainly_called(net, x):
    return net(x).square().sum()


def in_another_context(net, x):
    token = GAIN.set(1.5)
    loss = plainly_called(net, x)
    GAIN.reset(token)
    return loss


def with_a_local(net, x):
    LOCAL.gain = 1.5
    loss = plainly_called(net, x)
    LOCAL.gain = 1.0
    return loss


def with_another_owner(net, x):
    net.gain = 1.5
    loss = plainly_called(net, x)
    net.gain = 1.0
    return loss


def functionally(net, x):
    weights = {name: value * 1.5 for name, value in net.named_parameters()}
    return torch.func.functional_call(net, weights, (x,)).square().sum()


def with_another_parameter(net, x):
    inner, mine = net.blocks[1].inner, net.blocks[1].inner.weight
    inner.weight = nn.Parameter(mine.detach() * 1.5)
    loss = plainly_called(net, x)
    inner.weight = mine
    return loss + 0 * mine.sum()


def with_other_data(net, x):
    loss = plainly_called(net, x)
    net.blocks[1].inner.weight.data = net.blocks[1].inner.weight.data * 1.5
    return loss


@pytest.mark.parametrize("choice", ["full", "keep_matmul"])
@pytest.mark.parametrize(
    "change",
    [in_another_context, with_a_local, with_another_owner, functionally, with_another_parameter, with_other_data],
)
def test_what_changes_between_forward_and_backward_is_refused_at_once(change, choice):
    with pytest.raises(InexactRecomputationError, match="Surroundings would not be exact"):
        gradients_of(Surroundings, change, checkpointed(choice), num_calls=1)


@pytest.mark.parametrize("kind", [GatedRecurrent, Batched])
def test_kept_products_that_are_changed_in_place_are_refused(kind):
    """As `nn.GRU` does on the CPU; torch doesn't see it, and gives other gradients."""
    with pytest.raises(InexactRecomputationError, match="changed in place afterwards.*mode='full'"):
        gradients_of(kind, plainly_called, checkpointed("keep_matmul"))
    plain = gradients_of(kind, plainly_called, lambda net: None)
    assert gradients_of(kind, plainly_called, checkpointed("full")) == plain
