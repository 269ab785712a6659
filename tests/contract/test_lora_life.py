"""Adapters through a run's whole life: other stages, other callbacks, other checkpoints, any order, any module."""

import copy
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_memfit.adapters import lora
from lightning_memfit.adapters.checkpoint import merged_state_dict
from lightning_memfit.adapters.lora import adapted_layers
from lightning_memfit.adapters.quantized import quantized
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.profile.fake import turn_fake
from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.lora import Lora
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from lightning_memfit.techniques.quantized_weights import QuantizedWeights
from tests.contract.checkpointing.models import t5
from tests.contract.runs import assert_same_weights, loader, trainer
from tests.helpers.ranks import run_ranks

LORA = {"lora": [Lora(4)], "4bit": [QuantizedWeights(4), Lora(4)]}


class Net(pl.LightningModule):
    """Two layers over an embedding, with a parameter of no dimension and whatever `build` adds."""

    def __init__(self, forward=None, build=None):
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 64)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        if build is not None:
            build(self)
        self.compute = forward or (lambda self, x: self.head(self.backbone(x)))
        self.losses, self.evaluated = [], []

    def forward(self, x):
        return self.compute(self, x) * self.logit_scale

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch).flatten(0, 1), batch.flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch).flatten(0, 1), batch.flatten())
        self.evaluated.append(loss.item())
        self.log("val_loss", loss, batch_size=len(batch))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2)


def net(**kwargs):
    pl.seed_everything(0, verbose=False)
    return Net(**kwargs)


def fresh(name="lora"):
    return copy.deepcopy(LORA[name])


def fitted(callbacks, module=None, ckpt_path=None, **options):
    module = net() if module is None else module
    pl.seed_everything(1, verbose=False)
    run = trainer(callbacks, **{"max_steps": -1, "max_epochs": 1, "num_sanity_val_steps": 0, **options})
    run.fit(module, loader(), loader(1), ckpt_path=ckpt_path)
    return module, run


BATCH = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(9))


# --- any module -----------------------------------------------------------------------------------------------------


def shared_weight(self):
    self.twin = nn.Linear(64, 64)
    self.twin.weight = self.head.weight


def same_module_twice(self):
    self.again = nn.ModuleList([self.head])


MODULES = {
    "as usual": ({}, "auto"),
    "two layers share a weight": (
        {"build": shared_weight, "forward": lambda self, x: self.twin(self.head(self.backbone(x)))},
        "auto",
    ),
    "applied twice": ({"forward": lambda self, x: self.head(self.head(self.backbone(x)))}, "auto"),
    "a name that ends like another": (
        {"build": lambda self: setattr(self, "unused", nn.ModuleDict({"head": nn.Linear(64, 64)}))},
        ["head"],
    ),
    "complex, integer and empty parameters": (
        {
            "build": lambda self: (
                self.register_parameter("turn", nn.Parameter(torch.ones(3, dtype=torch.cfloat))),
                self.register_parameter("number", nn.Parameter(torch.tensor([3]), requires_grad=False)),
                self.register_parameter("nothing", nn.Parameter(torch.ones(0, 3))),
                self.register_buffer("nan", torch.tensor(float("nan"))),
            )
        },
        "auto",
    ),
    "layers of torch": (
        {
            "build": lambda self: setattr(
                self, "encoder", nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
            ),
            "forward": lambda self, x: self.head(self.encoder(self.backbone(x))),
        },
        "auto",
    ),
    "weight_norm on one layer": (
        {
            "build": lambda self: setattr(self, "normed", nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))),
            "forward": lambda self, x: self.head(self.normed(self.backbone(x))),
        },
        "auto",
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("order", [[Lora(4)], [QuantizedWeights(8), Lora(4)]], ids=["lora", "8bit"])
def test_starts_as_the_plain_module_and_is_the_same_merged(name, order):
    arguments, targets = MODULES[name]
    callbacks = copy.deepcopy(order)
    callbacks[-1].target_modules = targets
    plain = net(**arguments).eval()
    module, _ = fitted(callbacks, net(**arguments), max_epochs=2)
    first = F.cross_entropy(plain(next(iter(loader()))).flatten(0, 1), next(iter(loader())).flatten())
    quantized = len(order) > 1
    assert float(module.losses[0]) == pytest.approx(float(first), rel=1e-2 if quantized else 1e-6)
    assert module.losses[6] < module.losses[0]
    if quantized:
        return
    with torch.no_grad():
        expected = module.eval()(BATCH)
        Lora.merge(module)
        torch.testing.assert_close(module(BATCH), expected, rtol=1e-4, atol=3e-2)
    for (name, child), (_, other) in zip(module.named_modules(), plain.named_modules(), strict=True):
        assert type(child).__name__ == type(other).__name__, name  # parametrizations make classes


@pytest.mark.parametrize("bits", [4, 8])
def test_t5_casts_to_the_dtype_of_quantized_weights(bits):
    """The truth is a plain T5 whose weights were replaced by the dequantized ones."""

    class Seq2Seq(Net):
        def __init__(self):
            super().__init__()
            self.model = t5()

        def forward(self, x):
            return self.model.eval()(input_ids=x, labels=x).logits

    pl.seed_everything(0, verbose=False)
    module = Seq2Seq()
    plain = copy.deepcopy(module)
    for name, child in plain.named_modules():
        if type(child) is nn.Linear and not name.endswith(("lm_head", "wo")):  # transformers keeps `wo` in float32
            child.weight.data = quantized(child, bits)(torch.eye(child.in_features)).T
    with torch.no_grad():
        truth = plain(BATCH)

    class Compare(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            with torch.no_grad():
                torch.testing.assert_close(pl_module(BATCH), truth)

    fitted([QuantizedWeights(bits), Lora(4), Compare()], module)


REFUSED = {
    "tied to an embedding": (
        {"build": lambda self: setattr(self.head, "weight", self.backbone[0].weight)},
        ["head"],
        "head stays as it is: .*used in two places",
    ),
    "one layer in two places": (
        {"build": same_module_twice},
        ["again.0"],
        "again.0 stays as it is: .*used in two places",
    ),
    "adapters of peft": (
        {"build": lambda self: inject_adapter_in_model(LoraConfig(target_modules=["head"]), self)},
        "auto",
        "the module has adapters of rank=8, and `rank=4` was asked for",
    ),
    "weight_norm": (
        {"build": lambda self: nn.utils.weight_norm(self.head)},
        ["head"],
        "head stays as it is: .*computed from other parameters",
    ),
    "a layer that is no plain one": (
        {"build": lambda self: setattr(self, "attention", nn.MultiheadAttention(64, 4))},
        ["out_proj"],
        "no linear layer for 'out_proj'",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_an_adapter_cannot_reach_is_refused_before_a_weight_changes(name):
    arguments, targets, message = REFUSED[name]
    module = net(**arguments)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=message):
        fitted([Lora(4, target_modules=targets)], module)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert bool(adapted_layers(module)) == (name == "adapters of peft")


# --- adapters in float32 --------------------------------------------------------------------------------------------


class AdapterState(pl.Callback):
    """What is known of the adapters at the end of training."""

    def on_train_start(self, trainer, pl_module):
        self.before = {name: p.detach().clone() for name, p in self.adapters(pl_module)}
        self.dtypes = set()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.dtypes |= {p.grad.dtype for _, p in self.adapters(pl_module)}

    def on_train_end(self, trainer, pl_module):
        after = dict(self.adapters(pl_module))
        self.dtypes |= {p.dtype for p in after.values()}
        states = trainer.optimizers[0].state.values()
        self.dtypes |= {value.dtype for state in states for value in state.values() if value.dim() > 0}
        still = [(after[name] == value).double().mean() for name, value in self.before.items() if "lora_A" in name]
        self.still = max(still).item()

    def adapters(self, module):
        return ((name, p) for name, p in module.named_parameters() if "lora_" in name)


def adam_with_small_steps(self):
    return torch.optim.AdamW(self.parameters(), lr=1e-5, weight_decay=0.0)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", LORA)
def test_updates_too_small_for_bfloat16_reach_the_adapters(name, precision):
    module, seen = net(), AdapterState()
    module.configure_optimizers = adam_with_small_steps.__get__(module)
    fitted([*fresh(name), seen], module, precision=precision)
    assert seen.dtypes == {torch.float32}
    assert seen.still < 0.2
    assert module.backbone[0].weight.dtype is (torch.bfloat16 if precision == "bf16-true" else torch.float32)


def test_a_trace_of_a_module_with_adapters_keeps_them_in_float32():
    module = net().bfloat16()
    lora.inject(module, ["head"], rank=4, alpha=8.0, dropout=0.0, stay_float32=True)
    sizes = {info.name: info.itemsize for info in parameter_table(module.to(torch.bfloat16), torch.bfloat16)}
    clone = copy.deepcopy(module)
    turn_fake(clone, FakeTensorMode(), dtype=torch.bfloat16)
    for name, parameter in clone.named_parameters():
        assert parameter.dtype is (torch.float32 if "lora_" in name else torch.bfloat16)
        assert sizes[name] == parameter.element_size()
    assert {p.dtype for p in lora.adapter_parameters(module.double())} == {torch.float64}


# --- any order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        ([QuantizedWeights(4), Lora(4)], {}),
        ([QuantizedWeights(8), Lora(4)], {"precision": "bf16-true"}),
        ([Lora(4), Optimizer8bit(min_8bit_size=16)], {}),
        ([Lora(4), StochasticRounding()], {"precision": "bf16-true"}),
    ],
)
def test_the_order_of_callbacks_changes_no_bit(callbacks, options):
    def adam(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    runs = []
    for order in (callbacks, callbacks[::-1]):
        module = net()
        module.configure_optimizers = adam.__get__(module)
        fitted(copy.deepcopy(order), module, **options)
        runs.append(module)
    assert_same_weights(*runs)
    assert torch.equal(torch.stack(runs[0].losses), torch.stack(runs[1].losses))


# --- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LORA)
@pytest.mark.parametrize("weights_only", [False, True])
def test_evaluates_its_checkpoints(tmp_path, name, weights_only):
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=weights_only)
    module, run = fitted([*fresh(name), best], enable_checkpointing=True, max_epochs=3)
    during = min(module.evaluated)
    after = run.test(module, loader(1), ckpt_path="best", verbose=False)[0]["val_loss"]
    assert after == pytest.approx(during, rel=1e-6)
    assert run.validate(module, loader(1), ckpt_path="best", verbose=False)[0]["val_loss"] == after
    predicted = run.predict(module, loader(1), ckpt_path="best")[0]
    path = best.best_model_path
    alone = trainer(fresh(name)).predict(net(), loader(1), ckpt_path=path)[0]
    assert torch.equal(alone, predicted)
    plain = net()
    plain.load_state_dict(merged_state_dict(plain, torch.load(path)))
    merged = trainer().predict(plain, loader(1))[0]
    torch.testing.assert_close(
        merged, predicted, rtol=1e-4 if name == "lora" else 0.5, atol=1e-5 if name == "lora" else 0.5
    )


# --- beside other callbacks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("configures", [False, True])
def test_averages_of_weights(tmp_path, configures):
    """`EMAWeightAveraging` calls `configure_model` a second time."""

    def run(**options):
        module = net()
        if configures:
            module.configure_model = lambda: None
        return fitted([*fresh(), EMAWeightAveraging(decay=0.5)], module, **options)

    straight, _ = run(max_epochs=2)
    module, half = run()
    averaged = copy.deepcopy(module.state_dict())
    half.save_checkpoint(tmp_path / "after.ckpt")
    alone, _ = fitted(fresh())
    assert module.losses[0] == alone.losses[0]
    assert not torch.equal(module.head.lora_B["default"].weight, alone.head.lora_B["default"].weight)
    best = ModelCheckpoint(tmp_path / "during")
    fitted([*fresh(), EMAWeightAveraging(decay=0.5), best], enable_checkpointing=True)
    saved = torch.load(best.best_model_path)
    assert all(".lora_" in name for name in saved["state_dict"])
    resumed, _ = run(max_epochs=2, ckpt_path=best.best_model_path)
    assert_same_weights(resumed, straight)
    plain = net()
    trainer([Lora(4)]).test(plain, loader(1), ckpt_path=best.best_model_path, verbose=False)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, averaged[name], rtol=1e-4, atol=1e-5)


def test_averaging_that_would_break_is_refused():
    with pytest.raises(ValueError, match="List WeightAveraging last"):
        fitted([WeightAveraging(), Lora(4)])
    for averaging in (EMAWeightAveraging(), EMAWeightAveraging(use_buffers=False)):
        with pytest.raises(ValueError, match="would average codes"):
            fitted([QuantizedWeights(8), Lora(4), averaging])
    with pytest.raises(ValueError, match="unfreezes weights.*Leave BackboneFinetuning out"):
        fitted([QuantizedWeights(8), Lora(4), BackboneFinetuning()])


def test_weights_that_a_callback_unfreezes_are_trained_saved_and_loaded(tmp_path):
    def run(module=None, **options):
        return fitted([*fresh(), BackboneFinetuning(unfreeze_backbone_at_epoch=1)], module, **options)

    plain = net()
    module, half = run(max_epochs=2)
    assert not torch.equal(module.backbone[0].weight, plain.backbone[0].weight)
    half.save_checkpoint(tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt")["state_dict"]
    assert {"backbone.0.weight", "backbone.1.base_layer.weight"} <= saved.keys()
    assert "head.base_layer.weight" not in saved
    loaded, _ = run(max_epochs=2, ckpt_path=tmp_path / "two.ckpt")  # has nothing left to train
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert_same_weights(loaded, module)


# --- checkpoints of other runs --------------------------------------------------------------------------------------


def test_a_plain_checkpoint_is_refused_with_the_way_out(tmp_path):
    fitted([])[1].save_checkpoint(tmp_path / "full.ckpt")
    with pytest.raises(ValueError, match=r"not written by a run with Lora.*load_from_checkpoint"):
        fitted(fresh(), ckpt_path=tmp_path / "full.ckpt")


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        ([Lora(4)], [Lora(8)], r"other rank \(4, not 8\)"),
        ([Lora(4)], [Lora(4, alpha=8)], r"other alpha"),
        ([Lora(4)], [Lora(4, target_modules=["head"])], r"other layers"),
        ([Lora(4)], [QuantizedWeights(4), Lora(4)], r"other bits \(None, not 4\)"),
        ([QuantizedWeights(4), Lora(4)], [QuantizedWeights(8), Lora(4)], r"other bits \(4, not 8\)"),
    ],
)
def test_other_adapters_are_refused_with_the_way_out(tmp_path, writer, reader, message):
    _, run = fitted(copy.deepcopy(writer))
    run.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=message) as refused:
        fitted(copy.deepcopy(reader), ckpt_path=tmp_path / "x.ckpt")
    assert "merged_state_dict" in str(refused.value)


def on_two_ranks():
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    return fitted(fresh("4bit"), devices=2, strategy=strategy)[0].state_dict()


def test_two_processes(tmp_path):
    first, second = (one.result for one in run_ranks(on_two_ranks, 2, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- what is frozen and unfrozen in the run -------------------------------------------------------------------------


# --- callbacks that can't be served ---------------------------------------------------------------------------------


# --- after an error ---------------------------------------------------------------------------------------------------
