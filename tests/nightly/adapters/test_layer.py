"""Frozen layers compute what plain torch computes with `W + alpha / rank * B @ A`, whoever reads their weight."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from lightning_memfit.adapters.layer import NAME, add_adapter, dequantize, drop_adapter, quantize, share_adapter
from lightning_memfit.adapters.quantized import Codes

SCALE = 1.5


class Plus(nn.Module):
    """The truth: a product added to a weight by torch's own parametrization."""

    def __init__(self, layer, transposed):
        super().__init__()
        self.first = nn.Parameter(layer.lora_A[NAME].weight.detach().clone())
        self.second = nn.Parameter(layer.lora_B[NAME].weight.detach().clone())
        self.transposed = transposed

    def forward(self, weight):
        product = SCALE * self.second @ self.first
        return weight + (product.t() if self.transposed else product)


def adapted(layer, rank=3):
    torch.manual_seed(1)
    add_adapter(layer, rank, SCALE, 0.0).to(layer.weight.dtype)
    nn.init.normal_(layer.lora_B[NAME].weight)
    return layer


def pair(make):
    """An adapted layer, and the same in plain torch."""
    torch.manual_seed(0)
    plain = make().double().requires_grad_(False)
    layer = adapted(copy.deepcopy(plain))
    truth = Plus(layer, isinstance(plain, Conv1D))
    parametrize.register_parametrization(plain, "weight", truth)
    return layer, plain, truth


LAYERS = [lambda: nn.Linear(8, 6), lambda: nn.Linear(6, 6, bias=False), lambda: Conv1D(6, 8)]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8)])
@pytest.mark.parametrize("through", ["layer", "weight"])
def test_output_and_gradients_are_those_of_plain_torch(make, shape, through):
    layer, plain, truth = pair(make)
    size = plain.weight.shape[0] if isinstance(plain, Conv1D) else plain.weight.shape[1]
    x = torch.randn(*shape[:-1], size, dtype=torch.double)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()

    def run(module, value):
        if through == "layer":
            return module(value)
        weight = module.weight if isinstance(plain, Conv1D) else module.weight.t()
        return value @ weight + (0 if module.bias is None else module.bias)

    ours, expected = run(layer, mine), plain(theirs)
    torch.testing.assert_close(ours, expected)
    ours.square().sum().backward()
    expected.square().sum().backward()
    for a, b in ((mine, theirs), (layer.lora_A[NAME].weight, truth.first), (layer.lora_B[NAME].weight, truth.second)):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 32), lambda: Conv1D(32, 64)])
def test_a_quantized_layer_is_one_with_the_dequantized_weight(bits, make):
    torch.manual_seed(0)
    layer = make()
    rows = layer.weight.detach().t() if isinstance(layer, Conv1D) else layer.weight.detach()
    stored = Codes(rows, bits).dequantize(torch.float32)
    x, original, bias = torch.randn(3, 64), layer.weight, layer.bias
    quantize(layer, bits)
    torch.testing.assert_close(layer(x), F.linear(x, stored, bias))
    assert (layer.weight.dtype, layer.weight.shape, layer.weight.device) == (torch.float32, original.shape, x.device)
    assert torch.equal(layer.weight.clone(), stored.t() if isinstance(layer, Conv1D) else stored)
    layer.bfloat16()
    assert layer.weight.dtype is torch.bfloat16
    assert (layer.weight.float() - original).abs().max() < 0.2
    dequantize(layer)
    assert layer.weight is original
    assert type(layer) is type(make())


def test_begins_and_ends_as_the_layer_that_it_was():
    layer = nn.Linear(8, 6)
    seen = []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    before, x, kept = layer(torch.ones(2, 8)), torch.ones(2, 8), vars(layer).keys()
    add_adapter(layer, 2, SCALE, 0.0)
    assert isinstance(layer, nn.Linear)
    assert torch.equal(layer(x), before)
    assert len(seen) == 2
    assert list(layer.state_dict()) == ["weight", "bias", "lora_A.default.weight", "lora_B.default.weight"]
    drop_adapter(layer)
    assert type(layer) is nn.Linear
    assert vars(layer).keys() == kept
    assert [name for name, _ in layer.named_modules()] == [""]


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("nested", [False, True])
def test_fast_paths_of_torch_see_adapters_and_codes(bits, nested):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
    for child in model.layers:
        for linear in (child.linear1, child.linear2):
            adapted(linear)
            if bits is not None:
                quantize(linear, bits)
    x = torch.randn(2, 5, 64)
    expected = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), expected)


def test_what_looks_at_a_weight_gets_its_looks():
    layer = adapted(nn.Linear(8, 6))
    quantize(layer, 8)
    weight = layer.weight
    assert weight.requires_grad
    assert weight.is_leaf
    assert (weight.ndim, weight.numel(), len(weight), weight.size(0), weight.stride()) == (2, 48, 6, 6, (8, 1))
    assert weight.is_floating_point()
    assert weight.is_contiguous()
    assert not weight.detach().requires_grad
    assert not weight.data.requires_grad
    assert type(weight + 0) is torch.Tensor
    assert "grad_fn" in repr(weight)
    torch.testing.assert_close(torch.cat([weight, weight])[:6], copy.deepcopy(weight))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.data.zero_(),
        lambda w: w.detach().fill_(1),
        lambda w: nn.init.normal_(w),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: setattr(w, "data", torch.ones(6, 8)),
        lambda w: w.__iadd__(1),
        lambda w: torch.add(w, 1, out=w),
        lambda w: w.requires_grad_(False),
        lambda w: w.data_ptr(),
    ],
)
def test_writing_to_a_weight_that_stands_for_another_is_refused(write):
    layer = adapted(nn.Linear(8, 6))
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="nothing would keep"):
        write(layer.weight)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("make", LAYERS)
def test_copies_and_pickles_are_layers_of_their_own(make):
    layer = adapted(make())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, layer.weight)
        nn.init.zeros_(other.lora_B[NAME].weight)
        assert not torch.equal(other.weight, layer.weight)


def test_layers_with_one_weight_share_an_adapter():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    share_adapter(second, adapted(first))
    pair = nn.ModuleList([first, second])
    assert len(list(pair.parameters())) == 5  # one weight, two biases, A and B
    assert torch.equal(first.weight, second.weight)


def test_autocast_and_half_precision():
    layer, x = nn.Linear(8, 6), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        adapted(layer)
        nn.init.zeros_(layer.lora_B[NAME].weight)
        assert torch.equal(layer(x), before)
        assert layer(x).dtype is torch.bfloat16
        assert layer.weight.dtype is torch.float32
    layer.to(torch.bfloat16)
    assert layer(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_float64_weights_are_quantized_as_in_float32(bits):
    layer = nn.Linear(64, 32)
    wide = copy.deepcopy(layer).double()
    truth = layer.weight.detach().double()
    x = torch.randn(5, 64, dtype=torch.float64)
    ours = quantize(wide, bits)
    weight = ours.effective_weight()
    assert weight.dtype is torch.float64
    largest = truth.abs().max()
    assert (weight - truth).abs().max() <= largest * (0.2 if bits == 4 else 0.01)  # NF4's widest gap is 0.3
    assert torch.allclose(weight, quantize(layer, bits).effective_weight().double(), rtol=1e-6, atol=1e-7)
    assert torch.allclose(ours(x), F.linear(x, weight, ours.bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["jacrev", "jacfwd", "hessian", "jvp", "vmap"])
def test_quantized_layers_work_in_function_transforms(bits, kind):
    from torch import func

    layer = nn.Linear(64, 8)
    truth, ours = copy.deepcopy(layer).double(), quantize(layer.double(), bits)
    truth.weight.data = ours.effective_weight().detach()
    x, v = torch.randn(2, 3, 64, dtype=torch.float64)
    transformed = {
        "jacrev": lambda layer: func.vmap(func.jacrev(layer))(x),
        "jacfwd": lambda layer: func.vmap(func.jacfwd(layer))(x),
        "hessian": lambda layer: func.hessian(lambda x: layer(x).tanh().sum())(x[0]),
        "jvp": lambda layer: func.jvp(layer, (x,), (v,))[1],
        "vmap": lambda layer: func.vmap(layer, in_dims=1)(x[:, None].expand(3, 2, 64)),
    }[kind]
    assert torch.allclose(transformed(ours), transformed(truth), rtol=1e-10, atol=1e-12)


def test_factors_are_no_linear_layers():
    model = nn.Sequential(nn.Linear(8, 6))
    add_adapter(model[0], 2, SCALE, 0.0)
    assert [child for child in model.modules() if isinstance(child, nn.Linear)] == [model[0]]
