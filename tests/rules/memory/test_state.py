"""The list of state: every kind of change is seen, and put back."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memfit.memory.state import State, groups_of


class Holder(nn.Module):
    """Keeps state of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.number = 1
        self.entries = [1, [2]]
        self.by_name = {"a": 1, "b": {"c": torch.zeros(2)}}
        self.names = {1, 2}
        self.queue = deque([1, 2], maxlen=2)
        self.pair = (1, [2])
        self.array = np.zeros(2)
        self.cached = torch.zeros(2)
        self.source = random.Random(0)
        self.generators = [torch.Generator(), np.random.default_rng(0)]
        self.register_buffer("bank", torch.zeros(3))


CHANGES = {
    "number": lambda holder: setattr(holder, "number", 2),
    "new": lambda holder: setattr(holder, "other", 2),
    "gone": lambda holder: delattr(holder, "number"),
    "list": lambda holder: holder.entries.append(3),
    "inner list": lambda holder: holder.entries[1].append(3),
    "order": lambda holder: holder.by_name.update(a=holder.by_name.pop("a")),
    "inner tensor": lambda holder: holder.by_name["b"]["c"].add_(1),
    "set": lambda holder: holder.names.add(3),
    "queue": lambda holder: holder.queue.append(3),
    "list in a tuple": lambda holder: holder.pair[1].append(3),
    "array": lambda holder: holder.array.__setitem__(0, 1.0),
    "tensor": lambda holder: holder.cached.add_(1),
    "exchanged tensor": lambda holder: setattr(holder, "cached", torch.ones(2)),
    "source": lambda holder: holder.source.random(),
    "torch generator": lambda holder: torch.rand(1, generator=holder.generators[0]),
    "numpy generator": lambda holder: holder.generators[1].random(),
    "buffer": lambda holder: holder.bank.data.add_(1),
    "exchanged buffer": lambda holder: setattr(holder, "bank", torch.ones(3)),
    "weight": lambda holder: holder.inner.weight.data.zero_(),
    "exchanged weight": lambda holder: setattr(holder.inner, "weight", nn.Parameter(torch.zeros(4, 4))),
    "training": lambda holder: holder.eval(),
}


def described(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, dict):
        return [(key, described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [described(item) for item in value]
    return sorted(value) if isinstance(value, set) else str(value)


def everything(holder):
    return described([dict(sorted(vars(holder).items())), holder.state_dict(), holder.training, holder.inner.training])


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_seen_and_put_back(name):
    torch.manual_seed(0)
    holder = Holder()
    before, kept = everything(holder), [holder.entries, holder.bank, holder.inner.weight]
    state = State(groups_of([holder]))
    assert state.changed() == ()
    CHANGES[name](holder)
    [group] = state.changed()[:1]
    assert group.module in (holder, holder.inner)
    state.only(state.changed(), has_generators=False).restore()
    assert everything(holder) == before
    assert state.changed() == ()
    assert all(one is two for one, two in zip(kept, (holder.entries, holder.bank, holder.inner.weight), strict=True))


def test_what_is_put_back_for_a_while_is_as_it_was_found_afterwards():
    holder = Holder()
    state = State(groups_of([holder]))
    holder.number, holder.cached = 5, torch.ones(2)
    holder.entries.append(7)
    holder.bank.fill_(9)
    after = everything(holder)
    with state.put_back():
        assert (holder.number, holder.entries, holder.bank.tolist()) == (1, [1, [2]], [0.0, 0.0, 0.0])
        holder.entries.clear()
        holder.bank.fill_(3)
    assert everything(holder) == after


def test_global_generators():
    state = State(())
    assert not state.have_generators_moved()
    first = random.random(), np.random.rand()  # noqa: NPY002
    assert state.have_generators_moved()
    state.restore()
    assert (random.random(), np.random.rand()) == first  # noqa: NPY002


def test_the_graph_of_an_earlier_call_is_not_kept():
    holder = Holder()
    holder.cached = holder.inner(torch.ones(2))
    state = State(groups_of([holder]))
    assert state.changed() == ()
    state.restore()
    assert holder.cached.requires_grad
    assert holder.cached.grad_fn is None
