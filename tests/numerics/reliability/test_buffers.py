"""Buffers are put back as they were, however a step has changed them; those of more than a mebibyte are named."""

import pytest
import torch
from torch import nn

from lightning_memfit.reliability.buffers import BufferCopies


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("rows", torch.ones(1, 3))
        self.register_buffer("count", torch.tensor(1))
        self.constant = nn.Module()
        self.constant.register_buffer("mask", torch.full((3,), -torch.inf))
        self.large = nn.Module()
        self.large.register_buffer("queue", torch.ones(1 << 19))


def in_place(module):
    module.mean.mul_(torch.nan)


def another_object(module):
    module.mean = module.mean * torch.inf


def another_shape(module):
    module.rows = torch.cat([module.rows, torch.full((1, 3), torch.nan)])


def resized(module):
    module.rows.resize_(2, 3).fill_(torch.nan)


BROKEN = [in_place, another_object, another_shape, resized]


@pytest.mark.parametrize("spoil", BROKEN)
@pytest.mark.parametrize("steps", [0, 3])
def test_all_that_changed_is_put_back(spoil, steps):
    module = Keeps()
    copies = BufferCopies(module)
    for step in range(steps):
        copies.take()
        module.mean += 1
        module.rows = module.rows + step
        module.count += 1
    copies.take()
    before = {name: value.clone() for name, value in module.named_buffers()}
    spoil(module)
    module.count += 1
    assert copies.put_back() == (True, [])
    assert {name for name, _ in module.named_buffers()} == set(before)
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_what_stays_finite_is_left_alone():
    module = Keeps()
    copies = BufferCopies(module)
    copies.take()
    module.mean += 1
    assert copies.put_back() == (False, [])
    assert torch.equal(module.mean, torch.full((3,), 2.0))


def test_a_large_one_that_was_never_copied_is_named():
    module = Keeps()
    copies = BufferCopies(module)
    copies.take()
    module.large.queue *= torch.nan
    assert copies.put_back() == (False, ["large.queue"])


def test_buffers_that_the_first_forward_makes_are_none_yet():
    module = nn.LazyBatchNorm1d()
    copies = BufferCopies(module)
    copies.take()
    assert copies.put_back() == (False, [])
    module(torch.full((2, 3), torch.nan))
    is_broken, lost = copies.put_back()
    assert (is_broken, lost) == (False, ["running_mean", "running_var"])
    module.reset_running_stats()
    copies.take()
    module(torch.full((2, 3), torch.nan))
    assert copies.put_back() == (True, [])
    assert torch.equal(module.running_mean, torch.zeros(3))
