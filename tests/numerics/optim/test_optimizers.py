from dataclasses import replace
from functools import cache

import pytest
import torch

from lightning_memfit.estimate.architectures import ARCHITECTURES, NamedRun
from lightning_memfit.estimate.estimate import CUDA_ROUNDING
from lightning_memfit.estimate.named_model import trace_named
from lightning_memfit.memory import Category
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo, trained
from lightning_memfit.optim.optimizers import OPTIMIZERS, find_optimizer

SHAPES = [(300, 200), (64,), (5000,), (3, 50, 70), (100, 100), (4096,), (4095,), (1, 7)]


def torch_optimizer(name, **options):
    return lambda parameters: getattr(torch.optim, name)(parameters, 1e-3, **options)


def bitsandbytes_optimizer(name, **options):
    return lambda parameters: getattr(pytest.importorskip("bitsandbytes").optim, name)(parameters, lr=1e-3, **options)


REAL = {
    "sgd": torch_optimizer("SGD"),
    "sgd_momentum": torch_optimizer("SGD", momentum=0.9),
    "adam": torch_optimizer("Adam"),
    "adamw": torch_optimizer("AdamW"),
    "adamw_fused": torch_optimizer("AdamW", fused=True),
    "adafactor": torch_optimizer("Adafactor"),
    "lion": bitsandbytes_optimizer("Lion"),
    "adam_8bit": bitsandbytes_optimizer("Adam8bit"),
    "adamw_8bit": bitsandbytes_optimizer("AdamW8bit"),
    "lion_8bit": bitsandbytes_optimizer("Lion8bit"),
    "sgd_8bit": bitsandbytes_optimizer("SGD8bit", momentum=0.9),
}


def real_state_bytes(make, module):
    optimizer = make(list(module.parameters()))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", REAL)
def test_bytes_of_real_states(name, dtype):
    module = torch.nn.ParameterList([torch.randn(shape, dtype=dtype) for shape in SHAPES])
    assert find_optimizer(name).states.total_bytes(parameter_table(module)) == real_state_bytes(REAL[name], module)


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize(("name", "real"), [("paged_adamw", "PagedAdamW"), ("paged_adamw_8bit", "PagedAdamW8bit")])
def test_paged_states_are_as_large(name, real):
    module = torch.nn.ParameterList([torch.randn(shape) for shape in SHAPES])
    family = find_optimizer(name).states
    assert family.paged
    assert family.total_bytes(parameter_table(module)) == real_state_bytes(bitsandbytes_optimizer(real), module)


def test_frozen_and_tied_parameters_have_no_states_of_their_own():
    table = (
        ParameterInfo("a", 100, 4),
        ParameterInfo("frozen", 100, 4, trainable=False),
        ParameterInfo("tied", 100, 4, shared_with="a"),
    )
    assert find_optimizer("adamw").states.total_bytes(table) == 800


def test_exempt_parameters_keep_32_bits_and_rounding_is_per_tensor():
    table = (ParameterInfo("embedding", 5000, 4), ParameterInfo("weight", 5000, 4))
    family = find_optimizer("adamw_8bit").states
    one_quantized = 2 * (5000 + 4 * 20)
    assert family.total_bytes(table, keep_32bit=("embedding",)) == 2 * 4 * 5000 + one_quantized + 2048
    assert family.total_bytes(table, rounding_bytes=512) == 2 * 2 * (5120 + 512) + 2048


def test_adafactor_needs_shapes():
    with pytest.raises(ValueError, match="shape of w"):
        find_optimizer("adafactor").states.total_bytes([ParameterInfo("w", 6, 4, dims=2)])
    with pytest.raises(ValueError, match="total_bytes"):
        find_optimizer("adafactor").states.bytes_per_parameter()


def test_per_parameter_figures_agree_with_large_tensors():
    table = [ParameterInfo("w", 1 << 20, 4, dims=2, shape=(1 << 10, 1 << 10))]
    for family in (record.states for record in OPTIMIZERS.values()):
        if not family.factored:
            assert family.total_bytes(table) / (1 << 20) == pytest.approx(family.bytes_per_parameter(), abs=0.002)


SMALL = replace(ARCHITECTURES["gpt2"], config={"n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 3000})


@cache
def traced(optimizer, precision):
    return trace_named(NamedRun("gpt2", 2, 64, precision=precision, optimizer=optimizer), SMALL)


def at_the_steps_peak(profile, category):
    """Bytes of a category at the highest moment of the second optimizer step."""
    starts = [(at, name) for at, name in profile.events.phases]
    start = next(at for at, name in reversed(starts) if name == "step")
    peak = start + int(profile.events.live_bytes(CUDA_ROUNDING)[start:].argmax())
    return profile.events.breakdown_at(peak, CUDA_ROUNDING).get(category)


@pytest.mark.nightly_cases(
    "bf16-true-sgd",
    "bf16-true-adam",
    "bf16-true-lion",
    "32-true-sgd_momentum",
    "32-true-adamw_fused",
    "32-true-lion-",
)
@pytest.mark.parametrize(
    "name", ["sgd", "sgd_momentum", "adam", "adamw", "adamw_fused", "adamw_8bit", "lion", "lion_8bit"]
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_states_and_scratch_memory_agree_with_traces(name, precision):
    profile, family = traced(name, precision), find_optimizer(name).states
    states = family.total_bytes(profile.parameters, CUDA_ROUNDING)
    if name == "adamw_fused":  # its kernel reads the counts of steps, which are on the host for others
        states += CUDA_ROUNDING * len(trained(profile.parameters))
    assert at_the_steps_peak(profile, Category.OPTIMIZER_STATE) == pytest.approx(states, abs=2048)  # 8-bit code tables
    weights = sum(-(-p.numel * p.itemsize // CUDA_ROUNDING) * CUDA_ROUNDING for p in trained(profile.parameters))
    scratch = (family.scratch_copies or 0) * weights
    assert at_the_steps_peak(profile, Category.TEMPORARY) == pytest.approx(scratch, rel=0.01, abs=64 * 1024)
