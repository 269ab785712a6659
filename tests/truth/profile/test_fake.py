import copy
import weakref

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_memfit.profile.fake import (
    copyable_fakes,
    fake_pretrained_weights,
    give_up_memory,
    initialized_at_once,
    tensors_in,
    transformers_not_tracing,
    turn_fake,
)
from lightning_memfit.profile.quiet import collector_paused
from tests.helpers.modules import LanguageModel

from .modules import Classifier, batch, ids, tiny_gpt2, trace_cpu


class Rich(Classifier):
    """Tied weights, buffers, a plain tensor, a generator, a list that holds one of its own parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("dropped", torch.ones(2, dtype=torch.long), persistent=False)
        self.plain = {"inside": [torch.arange(3.0)]}
        self.mine = [self.first.weight]
        self.noise = torch.Generator().manual_seed(3)
        self.first.bias.requires_grad_(False)
        self._trainer = object()


@pytest.fixture
def turned():
    """A module that was turned, its plain tensors and hooks as they were, and what they are now."""
    module = Rich()
    before = dict(module.named_parameters(remove_duplicate=False))
    enclosed = module.first.weight
    module.reached = lambda: enclosed
    turn_fake(module, FakeTensorMode(), left_out=[module._trainer])
    return module, before


def test_tensors_become_fakes_where_they_are(turned):
    module, before = turned
    shapes = {name: parameter.shape for name, parameter in Rich().named_parameters(remove_duplicate=False)}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert parameter is before[name]
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, FakeTensor)
        assert parameter.shape == shapes[name]
    assert not module.first.bias.requires_grad
    assert isinstance(module.kept, FakeTensor)
    assert isinstance(module.plain["inside"][0], FakeTensor)
    assert module.first.weight is module.second.weight is module.mine[0] is module.reached()
    assert module.noise.initial_seed() == 3


def test_fakes_can_have_another_dtype():
    module = Rich()
    turn_fake(module, FakeTensorMode(), dtype=torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.dropped.dtype is torch.long


def test_hooks_on_gradients_stay():
    module, seen = nn.Linear(2, 2), []
    module.weight.register_hook(lambda gradient: seen.append("gradient"))
    module.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
    mode = FakeTensorMode()
    turn_fake(module, mode)
    with mode:
        module(torch.empty(3, 2)).sum().backward()
    assert seen == ["gradient", "accumulated"]
    assert isinstance(module.weight.grad, FakeTensor)


def test_memory_can_be_given_up():
    module = Rich()
    module.register_buffer("count", torch.tensor(3))
    give_up_memory(module)
    assert module.first.weight.is_meta
    assert module.second.weight is module.first.weight
    assert module.count == 3


class Snapshots(Classifier):
    """Trains towards a copy of its weights, made anew in every step."""

    def training_step(self, batch, batch_idx):
        before = copy.deepcopy(self.net).requires_grad_(False).to("cpu")
        return (self.net(batch["x"]) - before(batch["x"])).square().mean()


def test_copies_of_fakes_go_with_their_last_user():
    mode = FakeTensorMode()
    module = nn.Sequential(nn.Linear(3, 3))
    turn_fake(module, mode)
    with mode, copyable_fakes():
        made = copy.deepcopy(module)
        assert made.half() is made
    alive = weakref.ref(made)
    with collector_paused():
        del made
        assert alive() is None
    trace = trace_cpu(Snapshots(), batch())
    assert (trace.growth, trace.traced_batches, trace.remarks) == (None, 2, ())


def test_fakes_can_be_copied_while_it_is_wanted():
    with FakeTensorMode(), copyable_fakes():
        parameter = nn.Parameter(torch.empty(3))
        copied = copy.deepcopy({"a": parameter, "b": parameter})
    assert copied["a"] is copied["b"] is not parameter
    assert isinstance(copied["a"], nn.Parameter)
    assert copied["a"].requires_grad


def test_tensors_are_found_in_any_object():
    class Holder:
        def __init__(self):
            self.one, self.more = torch.zeros(1), {"x": (torch.zeros(2),), "again": None}
            self.more["again"] = self.one

    assert [tensor.numel() for tensor in tensors_in(Holder())] == [1, 2]
    with FakeTensorMode(), copyable_fakes():
        assert [tensor.numel() for tensor in tensors_in(Holder())] == [1, 2]


def test_transformers_still_has_the_name_that_is_replaced():
    import transformers.utils.import_utils as import_utils

    with FakeTensorMode():
        fake = torch.empty(2)
    assert import_utils.is_fake_tensor(fake)
    with transformers_not_tracing():
        assert not import_utils.is_fake_tensor(fake)
    assert import_utils.is_fake_tensor(fake)


def test_pretrained_weights_are_not_read(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    tiny_gpt2().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"not weights at all")

    class Pretrained(LanguageModel):
        def __init__(self, kind):
            super().__init__(nn.Identity())
            self.kind = kind

        def configure_model(self):
            if isinstance(self.model, nn.Identity):
                self.model = self.kind.from_pretrained(tmp_path, attn_implementation="eager").train()

    for kind in (GPT2LMHeadModel, AutoModelForCausalLM):
        trace = trace_cpu(Pretrained(kind), ids())
        assert sum(p.numel for p in trace.parameters if not p.shared_with) == tiny_gpt2().num_parameters()
    with pytest.raises(Exception, match=r"(?i)header|safetensors"):
        GPT2LMHeadModel.from_pretrained(tmp_path)
    with fake_pretrained_weights():
        assert isinstance(GPT2LMHeadModel.from_pretrained(tmp_path), GPT2LMHeadModel)


@pytest.mark.nightly
def test_pretrained_weights_of_diffusers_are_not_read(tmp_path, monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    diffusers.UNet2DModel(**sizes, **blocks).save_pretrained(tmp_path / "unet")
    monkeypatch.setattr(diffusers.UNet2DModel, "_keep_in_fp32_modules", ["time_embedding"])
    options = {"subfolder": "unet", "torch_dtype": torch.bfloat16, "use_safetensors": True}
    real = diffusers.UNet2DModel.from_pretrained(tmp_path, **options)
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"not weights at all")

    class Pretrained(LanguageModel):
        def __init__(self):
            super().__init__(nn.Identity())

        def configure_model(self):
            if isinstance(self.model, nn.Identity):
                self.model = diffusers.UNet2DModel.from_pretrained(tmp_path, subfolder="unet").train()

        def training_step(self, batch, batch_idx):
            return self.model(batch["images"], 3).sample.square().mean()

    def described(network):
        return {name: (parameter.shape, parameter.dtype) for name, parameter in network.named_parameters()}

    with fake_pretrained_weights():
        assert described(diffusers.UNet2DModel.from_pretrained(tmp_path, **options)) == described(real)
        for asked, dtype in (("auto", torch.float32), (torch.float8_e4m3fn, torch.float8_e4m3fn)):
            options["torch_dtype"] = asked
            other = diffusers.UNet2DModel.from_pretrained(pretrained_model_name_or_path=tmp_path, **options)
            assert other.conv_in.weight.dtype is dtype
    trace = trace_cpu(Pretrained(), {"images": torch.zeros(2, 3, 8, 8)})
    assert sum(p.numel for p in trace.parameters if not p.shared_with) == real.num_parameters()


def test_fake_weights_within_bounds_are_drawn_once():
    """torch draws until no value is out of bounds, and nobody knows whether a fake one is."""
    real = torch.empty(1000)
    with initialized_at_once():
        nn.init.trunc_normal_(real, std=1.0, a=-0.5, b=0.5)
        with FakeTensorMode():
            weight = torch.empty(3, 4)
            assert nn.init.trunc_normal_(weight, std=0.02) is weight
    assert 0.4 < float(real.abs().max()) <= 0.5
    if Version(torch.__version__) >= Version("2.13"):  # before, it draws once
        with FakeTensorMode(), pytest.raises(RuntimeError):
            nn.init.trunc_normal_(torch.empty(3, 4), std=0.02)


class DrawnWithinBounds(Classifier):
    def configure_model(self):
        self.drawn = nn.Linear(4, 4)
        nn.init.trunc_normal_(self.drawn.weight, std=0.02)


def test_a_trace_assumes_nothing_of_such_weights():
    assert not trace_cpu(DrawnWithinBounds(), batch()).assumptions
