import copy

import pytest
import torch
from torch import nn

from lightning_memfit.checkpointing.apply import apply_segments
from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.memory.ledger import StorageLedger
from tests.unit.checkpointing.models import gpt2, make
from tests.unit.checkpointing.test_apply import assert_equal_runs, gradients


def test_segments_are_exact_and_come_off():
    model, batch = make("resnet")
    plain = gradients(copy.deepcopy(model), batch)
    applied = apply_segments(model, find_blocks(model))
    assert applied.num_blocks == 2
    assert_equal_runs(gradients(model, batch), plain)
    applied.remove()
    assert "forward" not in vars(model.layer1)


def test_only_the_inputs_of_segments_are_kept():
    def block():
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    model = nn.Sequential(*(block() for _ in range(9)))
    x = torch.randn(64, 16, requires_grad=True)
    apply_segments(nn.ModuleDict({"model": model}), find_blocks(nn.ModuleDict({"model": model})))
    with StorageLedger() as ledger:
        loss = model(x).sum()
        kept = ledger.live_bytes
    boundary = 64 * 16 * 4
    random_state = 3 * torch.get_rng_state().numel()
    assert 3 * boundary <= kept < 3.5 * boundary + random_state
    loss.backward()


def test_blocks_called_by_other_code_are_refused():
    model = gpt2()
    with pytest.raises(ValueError, match=r"mode='sqrt'.*ModuleList"):
        apply_segments(model, find_blocks(model))
