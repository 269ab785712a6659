import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_memfit.bench.observe import bucket_bytes, copies_gradients, holds_whole_model, with_buckets
from lightning_memfit.memory import Category


@pytest.mark.parametrize("view", [False, True])
def test_buckets_of_ddp_are_one_copy_of_the_gradients(tmp_path, view):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 3))
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=view)
        wrapped(torch.zeros(2, 10)).sum().backward()
        wrapped(torch.zeros(2, 10)).sum().backward()
        copied = 0 if view else sum(4 * p.numel() for p in module.parameters())
        assert bucket_bytes(wrapped) == copied
    finally:
        torch.distributed.destroy_process_group()
    assert bucket_bytes(module) == 0


def test_a_ledger_takes_the_rebuilt_buckets_for_activations():
    tracked = {Category.ACTIVATION: 100, Category.GRADIENT: 30}
    both = {Category.ACTIVATION: 70, Category.GRADIENT: 30, Category.COMMUNICATION: 30}
    assert with_buckets(tracked, 30, followed_steps=2) == both
    assert with_buckets(tracked, 30, followed_steps=1) == {**both, Category.ACTIVATION: 100}
    assert with_buckets(tracked, 0, followed_steps=2) == tracked


def test_which_strategies_hold_a_whole_model_and_copy_its_gradients():
    single, ddp = SingleDeviceStrategy("cpu"), DDPStrategy()
    assert [holds_whole_model(strategy) for strategy in (single, ddp, FSDPStrategy())] == [True, True, False]
    assert [copies_gradients(strategy) for strategy in (single, ddp)] == [False, True]
    assert not copies_gradients(DDPStrategy(gradient_as_bucket_view=True))
