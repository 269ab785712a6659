import functools
import types

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_memfit.profile.dispatch import CudaDispatch, choose_attention, cuda_autocast_lists
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from tests.truth.profile.modules import trace_step

AMPERE, RTX_3090, HOPPER, VOLTA, PASCAL = (8, 0), (8, 6), (9, 0), (7, 0), (6, 1)
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32


def heads(dtype=BF16, head=64, num=4, dims=4):
    shape = (2, num, 16, head)[-dims:]
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("query", "settings", "expected"),
    [
        (heads(), {}, "flash"),
        (heads(HALF), {}, "flash"),
        (heads(FULL), {}, "efficient"),  # flash takes half precision only
        (heads(), {"mask": True}, "efficient"),  # and no mask
        (heads(), {"capability": VOLTA}, "math"),  # no bf16 there
        (heads(HALF), {"capability": VOLTA}, "efficient"),
        (heads(FULL), {"capability": PASCAL}, "efficient"),
        (heads(head=256), {}, "flash"),
        (heads(head=264), {}, "efficient"),
        (heads(head=256), {"capability": RTX_3090, "dropout": 0.1}, "efficient"),
        (heads(head=256), {"capability": RTX_3090}, "flash"),
        (heads(FULL, head=30), {}, "math"),  # unaligned
        (heads(head=30), {}, "flash"),  # padded
        (heads(dims=3), {}, "math"),
        (heads(), {"capability": HOPPER}, "cudnn"),
        (heads(head=256), {"capability": HOPPER}, "flash"),
        (heads(num=8), {"grouped": True, "mask": True}, "math"),
    ],
)
def test_the_kernel_that_cuda_takes(query, settings, expected):
    key = heads(query.dtype, query.size(-1), 4, query.dim())
    mask = torch.empty(16, 16, dtype=query.dtype, device="meta") if settings.pop("mask", False) else None
    arguments = {"capability": AMPERE, "dropout": 0.0, "grouped": False, **settings}
    assert choose_attention(query, key, key, mask, **arguments) == expected


def chosen(query, capability=AMPERE):
    return choose_attention(query, query, query, None, 0.0, capability, grouped=False)


FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("switched_on", "query", "capability", "expected"),
    [
        (MATH, heads(), AMPERE, "math"),
        ([MATH, EFFICIENT], heads(), AMPERE, "efficient"),
        ([MATH, FLASH], heads(FULL), AMPERE, "math"),  # flash takes half precision only
        (CUDNN, heads(), AMPERE, "cudnn"),  # which is asked last there
        ([FLASH, MATH], heads(), HOPPER, "flash"),
    ],
)
def test_only_kernels_that_are_switched_on_are_taken(switched_on, query, capability, expected):
    with sdpa_kernel(switched_on):
        assert chosen(query, capability) == expected


@pytest.mark.parametrize("switched_on", [[FLASH, CUDNN], []])
def test_attention_without_a_kernel_fails_as_it_does_on_cuda(switched_on):
    with sdpa_kernel(switched_on), pytest.raises(RuntimeError, match="No available kernel"):
        chosen(heads(FULL))


def test_cudnn_is_not_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(heads(), HOPPER) == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert chosen(heads(), HOPPER) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


def saved_bytes(function):
    """Distinct storages that autograd keeps, in bytes."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function()
    del kept
    return sum(storages.values())


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


def test_dropout_keeps_one_byte_per_element_on_cuda_and_a_float_on_the_cpu(fake):
    x = torch.randn(1000, requires_grad=True)
    with CudaDispatch():
        assert saved_bytes(lambda: F.dropout(x, 0.1)) == 1000
        assert saved_bytes(lambda: nn.Dropout(0.1)(x)) == 1000
        assert saved_bytes(lambda: torch.dropout(x, 0.1, True)) == 1000
        assert saved_bytes(lambda: F.dropout(x, 0.1, training=False)) == 0
        assert F.dropout(x, 0.0) is x
        assert saved_bytes(lambda: F.dropout(x, 1.0)) <= 8
    assert saved_bytes(lambda: F.dropout(x, 0.1)) >= 4000


def test_dropout_inside_of_attention_keeps_one_byte_per_score(fake):
    q = torch.randn(2, 4, 128, 64, requires_grad=True)
    kept = {}
    with CudaDispatch(), sdpa_kernel(MATH):
        for dropout in (0.0, 0.1):
            attention = functools.partial(F.scaled_dot_product_attention, q, q, q, dropout_p=dropout)
            kept[dropout] = saved_bytes(attention)
    scores = 2 * 4 * 128 * 128
    assert kept[0.1] - kept[0.0] == scores + 4 * scores  # the mask, and what it leaves of the probabilities


@pytest.mark.parametrize(("kernel", "switched_on"), [("flash", FLASH), ("efficient", EFFICIENT), ("math", MATH)])
def test_scores_are_kept_by_the_math_kernel_only(fake, kernel, switched_on):
    q, k, v = (torch.randn(2, 4, 128, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    dispatch = CudaDispatch()
    with dispatch, sdpa_kernel(switched_on):
        kept = saved_bytes(lambda: F.scaled_dot_product_attention(q, k, v))
    scores = 2 * 4 * 128 * 128 * 2
    inputs_and_output = 4 * 2 * 4 * 128 * 64 * 2
    assert dispatch.used == {kernel: 1}
    if kernel == "math":
        assert kept >= scores + inputs_and_output / 4 * 3
    else:
        assert inputs_and_output < kept < inputs_and_output + scores / 4


class Listens(TorchDispatchMode):
    """Keeps operators with their results."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.heard.append((func, result))
        return result


def test_the_math_kernel_adds_masks_in_the_type_of_its_queries(fake):
    q, mask = torch.randn(2, 4, 16, 64, dtype=BF16), torch.ones(16, 16, dtype=torch.bool)
    with CudaDispatch(), sdpa_kernel(MATH), Listens() as mode:
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    made = [result for func, result in mode.heard if func.overloadpacket is torch.ops.aten.where]
    assert [(one.dtype, tuple(one.shape)) for one in made] == [(BF16, (16, 16))]


class GroupedAttention(pl.LightningModule):
    """Eight heads of queries, two of keys and values, as in Llama, Mistral and Qwen."""

    def __init__(self):
        super().__init__()
        self.queries, self.pairs = nn.Linear(64, 8 * 16), nn.Linear(64, 2 * 2 * 16)

    def training_step(self, batch, batch_idx):
        q = self.queries(batch).unflatten(-1, (8, 16)).transpose(1, 2)
        k, v = self.pairs(batch).unflatten(-1, (4, 16)).transpose(1, 2).chunk(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


@pytest.mark.parametrize(("capability", "kernel"), [(AMPERE, "flash"), (HOPPER, "cudnn")])
def test_grouped_attention_is_traced_and_its_flops_are_those_of_all_heads(capability, kernel):
    trace = trace_step(
        GroupedAttention(), torch.randn(3, 32, 64), StepOptions("bf16-mixed"), Emulation(capability=capability)
    )
    assert set(trace.attention_kernels) == {kernel}
    linears, product = 2 * 3 * 32 * 64 * (8 + 2 + 2) * 16, 2 * 3 * 8 * (32 * 33 // 2) * 16  # what the mask lets through
    assert trace.flops["forward"] == linears + 2 * product
    assert trace.flops["backward"] == linears + 5 * product  # the input has no gradient


class Mixture(pl.LightningModule):
    """transformers' own mixture of experts."""

    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        self.model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.nightly_cases("bf16-mixed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_mixtures_of_experts_of_transformers_are_traced_for_cuda(precision):
    def expert_flops(length):
        batch = torch.randint(99, (2, length))
        trace = trace_step(Mixture(), batch, StepOptions(precision), Emulation(capability=AMPERE))
        return trace.flops["forward"]

    # Of both products; the fused kernel, in half precision, skips what the causal mask hides.
    pairs = {n: n * n if precision == "32-true" else n * (n + 1) // 2 for n in (16, 32)}
    attention = {length: 2 * 2 * 2 * 2 * 4 * pairs[length] * 8 for length in (16, 32)}
    short, long = (expert_flops(length) - attention[length] for length in (16, 32))
    assert long == 2 * short  # each token meets as many experts
    assert short > 2 * 2 * 16 * 2 * 2 * 3 * 32 * 64  # two experts of three products per token and layer


def test_attention_runs_in_half_precision_under_autocast(fake):
    q = torch.randn(2, 4, 16, 64, requires_grad=True)
    dispatch = CudaDispatch()
    with dispatch, torch.autocast("cpu", BF16):
        assert F.scaled_dot_product_attention(q, q, q).dtype is BF16
    assert dispatch.used == {"flash": 1}


def in_inference_mode(q):
    with torch.inference_mode():
        return F.scaled_dot_product_attention(q.clone(), q.clone(), q.clone())


CALLS = {
    "imported by name": lambda q: imported_by_name(q, q, q),
    "held by an object": lambda q: HELD.attention(q, q, q),
    "a default argument": lambda q, attention=F.scaled_dot_product_attention: attention(q, q, q),
    "the operator": lambda q: torch.ops.aten.scaled_dot_product_attention(q, q, q, is_causal=True),
    "in C++": lambda q: torch._C._nn.scaled_dot_product_attention(q, q, q),
    "in inference mode": in_inference_mode,
    "under vmap": lambda q: torch.vmap(lambda one: F.scaled_dot_product_attention(one[None], one[None], one[None]))(q),
}
HELD = types.SimpleNamespace(attention=F.scaled_dot_product_attention)


@pytest.mark.parametrize("call", CALLS)
def test_attention_is_followed_by_whatever_name_it_is_called(fake, call):
    q = torch.randn(2, 4, 16, 64, dtype=BF16)
    dispatch = CudaDispatch()
    with dispatch:
        CALLS[call](q)
    assert dispatch.used == {"flash": 1}


def test_the_kernels_are_put_back_after_an_error(fake):
    def fail():
        with dispatch:
            assert saved_bytes(lambda: torch.dropout(x, 0.1, True)) == 1000
            CALLS["the operator"](q)
            raise KeyError

    x, q = torch.randn(1000, requires_grad=True), torch.randn(2, 4, 16, 64, dtype=BF16)
    dispatch = CudaDispatch()
    with pytest.raises(KeyError):
        fail()
    assert saved_bytes(lambda: torch.dropout(x, 0.1, True)) == 4000
    for call in CALLS.values():
        call(q)
    assert dispatch.used == {"flash": 1}


def dtypes_under_autocast():
    x = torch.randn(4, 8)
    with torch.autocast("cpu", BF16):
        hidden = x @ torch.randn(8, 8)
        return {
            "matmul": hidden.dtype,
            "exp": hidden.exp().dtype,
            "pow": hidden.pow(2).dtype,
            "sum": hidden.sum().dtype,
            "softmax": hidden.softmax(-1).dtype,
            "layer_norm": F.layer_norm(hidden, (8,)).dtype,
            "mse_loss": F.mse_loss(hidden, hidden).dtype,
            "gelu": F.gelu(hidden).dtype,
        }


def test_autocast_has_cudas_list_and_the_cpus_afterwards():
    before = dtypes_under_autocast()
    with cuda_autocast_lists():
        inside = dtypes_under_autocast()
    assert dtypes_under_autocast() == before
    assert {name for name, dtype in inside.items() if dtype is BF16} == {"matmul", "gelu"}
    assert before["exp"] is BF16
    with pytest.raises(KeyError), cuda_autocast_lists():
        raise KeyError
    assert dtypes_under_autocast() == before


@pytest.mark.parametrize("default", [torch.float32, BF16])
def test_a_boolean_mask_is_made_additive_alike_whatever_the_default_type_is(fake, default):
    """Lightning's true half precision sets the default type in forward, and not where a checkpoint recomputes."""
    q = torch.randn(2, 4, 16, 64, dtype=BF16, requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with CudaDispatch(), Listens() as mode:
            F.scaled_dot_product_attention(q, q, q, mask)
    finally:
        torch.set_default_dtype(before)
    seen = [func for func, _ in mode.heard]
    assert torch.ops.aten._scaled_dot_product_efficient_attention.default in seen
    assert torch.ops.aten._to_copy.default not in seen
