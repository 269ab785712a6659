import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_memfit.bench.ddp_buckets import bucket_bytes


def test_buckets_of_ddp_are_one_copy_of_the_gradients(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 3))
        wrapped = DistributedDataParallel(module)
        wrapped(torch.zeros(2, 10)).sum().backward()
        wrapped(torch.zeros(2, 10)).sum().backward()
        assert bucket_bytes(wrapped) == sum(4 * p.numel() for p in module.parameters())
    finally:
        torch.distributed.destroy_process_group()
    assert bucket_bytes(module) == 0
