"""Losses of Lora and QuantizedWeights against peft's adapters on bitsandbytes' layers, put together by hand."""

import bitsandbytes as bnb
import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.pytorch_utils import Conv1D

from lightning_memfit import Lora, QuantizedWeights
from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import Emulation
from tests.contract.checkpointing.models import gpt2, llama, t5
from tests.contract.runs import loader, trainer

MODELS = {
    "gpt2": (lambda: gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0), ("c_attn", "c_proj", "c_fc")),
    "llama": (llama, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "t5": (t5, ("q", "k", "v", "o", "wi")),
}


class Network(pl.LightningModule):
    def __init__(self, make):
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.model = make()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def quantize_by_hand(module, names, bits):
    for owner in list(module.modules()):
        for name, layer in list(owner.named_children()):
            if name not in names or not isinstance(layer, (nn.Linear, Conv1D)):
                continue
            weight = layer.weight.detach().T.contiguous() if isinstance(layer, Conv1D) else layer.weight.detach()
            if bits == 4:
                made = bnb.nn.Linear4bit(*reversed(weight.shape), quant_type="nf4")
                made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
            else:
                made = bnb.nn.Linear8bitLt(*reversed(weight.shape), has_fp16_weights=False)
                made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            made.bias = layer.bias
            setattr(owner, name, made.to("cpu"))


def put_adapters(module, names):
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8.0, target_modules=list(names)), module)


def fit(module, *callbacks, **options):
    run = trainer(callbacks, max_steps=7, **options)
    run.fit(module, loader())
    return torch.stack(module.losses)


class Seed(pl.Callback):
    """Lets adapters be drawn after the seed that the run by hand has."""

    def setup(self, trainer, pl_module, stage):
        pl.seed_everything(1, verbose=False)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_peft_by_hand(name, bits, precision):
    make, names = MODELS[name]
    by_hand, ours = Network(make), Network(make)
    if bits is not None:
        quantize_by_hand(by_hand, names, bits)
    pl.seed_everything(1, verbose=False)
    put_adapters(by_hand, names)
    expected = fit(by_hand, precision=precision)
    quantizers = [QuantizedWeights(bits, target_modules=names)] if bits is not None else []
    losses = fit(ours, *quantizers, Lora(4, alpha=8.0, target_modules=names), Seed(), precision=precision)
    assert losses[6] < losses[0]  # the same batch
    if precision == "32-true":
        assert torch.equal(losses, expected)
    else:  # layers of bitsandbytes by hand compute in float32 where their input is, autocast or not
        torch.testing.assert_close(losses, expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_are_quantized_already_stay(bits):
    make, names = MODELS["llama"]
    module = Network(make)
    quantize_by_hand(module, names, bits)
    layer = module.model.model.layers[0].mlp.up_proj
    losses = fit(module, QuantizedWeights(4), Lora(4, alpha=8.0), Seed())
    assert losses[6] < losses[0]
    assert module.model.model.layers[0].mlp.up_proj.get_base_layer() is layer
    again = fit(module, QuantizedWeights(4), Lora(4, alpha=8.0))
    assert again[7] < losses[0], "it goes on with the adapters that it has"


class BuildsAdapters(Network):
    """Builds adapters of peft by itself, in `configure_model`."""

    def __init__(self, make, names):
        super().__init__(make)
        self.names = names

    def configure_model(self):
        if not hasattr(self, "peft_config"):
            put_adapters(self, self.names)


def test_adapters_of_peft_that_a_module_builds_are_estimated():
    module = BuildsAdapters(*MODELS["llama"])
    batch = next(iter(loader()))
    traced = profile_module(module, batch, emulation=Emulation(device="cpu"), any_micro_batch=False)
    measured = measure_step(module, batch)
    assert predict_peak_bytes(traced, 2) == pytest.approx(predict_peak_bytes(measured, 2), rel=0.03)
    assert not any(isinstance(parameter, FakeTensor) for parameter in module.parameters())
