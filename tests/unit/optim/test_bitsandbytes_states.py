import gc
import weakref

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from lightning_memfit.optim.eight_bit import check_states, embedding_parameters, repage_states, to_bitsandbytes


@pytest.fixture(autouse=True)
def _clean_manager():
    manager = bnb.optim.GlobalOptimManager.get_instance()
    yield
    manager.pid2config.clear()
    manager.index2config.clear()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embedding.weight


def stepped(module, **kwargs):
    optimizer = to_bitsandbytes(torch.optim.AdamW(module.parameters()), **kwargs)
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def test_embeddings_and_tied_heads_keep_32_bit_states():
    module = Tied()
    kept = embedding_parameters(module)
    assert [id(p) for p in kept] == [id(module.head.weight)]
    optimizer = stepped(module, keep_32bit=kept)
    check_states(optimizer)
    assert optimizer.state[module.head.weight]["state1"].dtype is torch.float32
    assert optimizer.state[module.body.weight]["state1"].dtype is torch.uint8
    assert optimizer.state[module.body.bias]["state1"].dtype is torch.float32  # 64 elements


def test_nothing_leaks_into_or_from_other_optimizers():
    module = Tied()
    stepped(module, keep_32bit=[module.body.weight])
    assert not bnb.optim.GlobalOptimManager.get_instance().pid2config
    assert stepped(module).state[module.body.weight]["state1"].dtype is torch.uint8


def test_optimizers_die_with_their_last_reference():
    optimizer = stepped(Tied())
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


def test_overrides_by_position_do_not_reach_us():
    other = nn.Linear(100, 100)
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.override_config(other.weight, "optim_bits", 32)
    manager.register_parameters(other.parameters())
    module = Tied()
    leaking = bnb.optim.AdamW8bit(module.parameters())
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    leaking.step()
    assert leaking.state[module.embedding.weight]["state1"].dtype is torch.float32  # upstream's leak is still there
    assert stepped(module).state[module.embedding.weight]["state1"].dtype is torch.uint8


def test_a_users_own_override_by_parameter_counts():
    module = Tied()
    bnb.optim.GlobalOptimManager.get_instance().override_config(module.body.weight, "optim_bits", 32)
    optimizer = stepped(module)
    check_states(optimizer)
    assert optimizer.state[module.body.weight]["state1"].dtype is torch.float32


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state1", torch.zeros(64, 64)),
        ("state2", torch.zeros(64, 64, dtype=torch.float16)),
        ("state1", torch.zeros(64, 63, dtype=torch.uint8)),
        ("absmax1", torch.zeros(3)),
    ],
)
def test_tampered_states_are_found(key, value):
    module = Tied()
    optimizer = stepped(module)
    check_states(optimizer)
    optimizer.state[module.body.weight][key] = value
    with pytest.raises(RuntimeError, match=r"8-bit states for a parameter of shape \(64, 64\)"):
        check_states(optimizer)


def test_ademamix_has_two_moments_in_one_state():
    module = Tied()
    optimizer = to_bitsandbytes(bnb.optim.AdEMAMix(module.parameters()))
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    check_states(optimizer)
    assert optimizer.state[module.body.weight]["state1"].shape == (2, 64, 64)


def test_nothing_is_paged_on_the_cpu():
    module = Tied()
    with pytest.warns(UserWarning, match="Paged optimizers are not supported on CPU"):
        optimizer = stepped(module, paged=True)
    assert repage_states(optimizer) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_paged_states_stay_paged_after_resume():
    def module():
        torch.manual_seed(0)
        return nn.Linear(512, 512).cuda()

    first = module()
    optimizer = stepped(first, paged=True)
    assert optimizer.state[first.weight]["state1"].is_paged
    second = module()
    second.load_state_dict(first.state_dict())
    resumed = to_bitsandbytes(torch.optim.AdamW(second.parameters()), paged=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert repage_states(resumed) == 2
    assert resumed.state[second.weight]["state2"].is_paged
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        b.grad = a.grad.clone()
    optimizer.step()
    resumed.step()
    assert torch.equal(first.weight, second.weight)
