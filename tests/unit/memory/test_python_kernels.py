import pytest
import torch

from lightning_memfit.memory import Category
from lightning_memfit.memory.ledger import StorageLedger, python_kernel

bitsandbytes = pytest.importorskip("bitsandbytes")


def test_bitsandbytes_still_has_the_kernels():
    import bitsandbytes.backends.cpu.ops

    assert bitsandbytes.backends.cpu.ops
    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        operator = getattr(torch.ops.bitsandbytes, name).default
        assert callable(python_kernel(operator))
    assert python_kernel(torch.ops.aten.add.Tensor) is None
    assert python_kernel(torch.ops.bitsandbytes.quantize_blockwise.default) is None


def stepped(python_kernels):
    """Weights after two 8-bit steps, and the steps' peak over what was alive before the last."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 14))
    optimizer = bitsandbytes.optim.AdamW8bit([weight], min_8bit_size=1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    ledger = StorageLedger(python_kernels=python_kernels)
    for tensor in (weight, weight.grad, *optimizer.name2qmap.values(), *optimizer.state[weight].values()):
        if isinstance(tensor, torch.Tensor):
            ledger.track(tensor, Category.PARAMETER)
    before = ledger.live_bytes
    with ledger:
        optimizer.step()
    assert ledger.live_bytes == before
    return weight.detach(), ledger.peak_bytes - before


def test_a_ledger_sees_what_a_step_dequantizes_and_changes_no_number():
    seen, peak = stepped(True)
    unseen, hidden = stepped(False)
    assert torch.equal(seen, unseen)
    assert peak >= hidden + 3 * seen.nbytes  # both moments and the weight in fp32
