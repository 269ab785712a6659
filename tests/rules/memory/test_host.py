"""What a run keeps on the host is no part of the device's peak, and is shown by its tier."""

import pytest
import torch

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.memory import Category, Tier
from lightning_memfit.memory.host import is_on_host, keep_on_host, return_to_device
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from lightning_memfit.techniques.lora import Lora
from lightning_memfit.techniques.quantized_weights import QuantizedWeights
from tests.contract.runs import LanguageModel

CONFIG = {"n_embd": 128, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
BATCH = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def estimated(callbacks, device="cuda", precision="bf16-true", num_blocks=4, measured=False):
    model = LanguageModel(n_layer=num_blocks, **CONFIG)
    arguments = {"options": StepOptions(precision=precision), "callbacks": tuple(callbacks)}
    if measured:
        return model, estimate_step(measure_step(model, BATCH, **arguments))
    profile = profile_module(model, BATCH, emulation=Emulation(device), any_micro_batch=False, **arguments)
    return model, estimate_step(profile)


@pytest.mark.parametrize("num_blocks", [4, 9])
def test_masters_gradients_and_states_lie_on_the_host(num_blocks):
    model, estimate = estimated([HostMasterWeights()], num_blocks=num_blocks)
    count, small = sum(p.numel() for p in model.parameters()), 4 * sum(1 for _ in model.parameters())
    host = estimate.breakdown.by_category(Tier.HOST)
    assert host[Category.PARAMETER] == host[Category.GRADIENT] == 4 * count
    assert host[Category.OPTIMIZER_STATE] == 8 * count + small  # and `step` of every parameter
    blocks = sum(1 << (2 * p.numel() - 1).bit_length() for p in model.parameters())
    pinned = {Category.TEMPORARY: 2 * count, Category.FRAGMENTATION: blocks - 2 * count}
    assert estimate.breakdown.by_category(Tier.PINNED_HOST) == pinned
    assert blocks > 2 * count
    assert estimate.breakdown.get(Category.OPTIMIZER_STATE) == 0
    assert estimate.breakdown.get(Category.PARAMETER) == pytest.approx(2 * count, rel=0.01)
    assert estimate.allocated_bytes < 5 * count + (1 << 20)


def test_a_measured_step_tells_the_same_but_for_pinned_memory():
    _, traced = estimated([HostMasterWeights()], "cpu")
    _, measured = estimated([HostMasterWeights()], measured=True)
    assert traced.breakdown.by_category(Tier.HOST) == measured.breakdown.by_category(Tier.HOST)
    assert Tier.PINNED_HOST.value not in traced.breakdown.to_dict()


@pytest.mark.nightly
def test_less_on_the_device_with_adapters_and_still_less_with_quantized_weights():
    peaks = {}
    for name, callbacks in {"full": [], "lora": [Lora(4)], "4 bits": [QuantizedWeights(4), Lora(4)]}.items():
        model, estimate = estimated(callbacks, precision="32-true", num_blocks=9)
        peaks[name] = estimate.allocated_bytes
    linear = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name)
    assert estimate.breakdown.get(Category.PARAMETER, Tier.HOST) == 0
    saved = peaks["lora"] - peaks["4 bits"]
    assert saved > 0.8 * (4 - 0.55) * linear  # one dequantized weight is there while it is used
    assert peaks["lora"] < 0.6 * peaks["full"]


def test_a_ledger_leaves_out_what_stands_for_the_host():
    ledger = StorageLedger()
    with ledger:
        tensor = torch.ones(1000)
        assert ledger.live_bytes == 4000
        keep_on_host(tensor, Category.PARAMETER)
        assert ledger.live_bytes == 0
        tensor.detach()
        assert ledger.live_bytes == 0
        assert is_on_host(tensor)
        return_to_device(tensor)
        tensor.detach()
        assert ledger.live_bytes == 4000


def test_the_mark_dies_with_its_tensor():
    tensor = torch.ones(10)
    keep_on_host(tensor, Category.PARAMETER)
    key = tensor.untyped_storage()._cdata
    del tensor
    from lightning_memfit.memory import host

    assert key not in host._storages
