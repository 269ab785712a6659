import pytest
import torch
from torch.optim import lr_scheduler

from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.optimizer import ReplaceOptimizer
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.contract.runs import LanguageModel, fit

ADAFACTOR = {"name": "torch.Adafactor", "options": {"eps": [None, 1e-3]}, "drop": ["betas"]}
LION = {"name": "bitsandbytes.Lion", "options": {"betas": [0.9, 0.99]}}


def scheduled(module):
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-3, betas=(0.9, 0.95))
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"},
    }


def module():
    return LanguageModel(scheduled, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def test_with_stochastic_rounding():
    ours = fit([ReplaceOptimizer(**ADAFACTOR), StochasticRounding()], module, precision="bf16-true")
    states = ours.seen["trainer"].optimizers[0].state
    assert all(state["row_var"].dtype is torch.float32 for state in states.values() if "row_var" in state)


def test_what_cannot_carry_over_is_refused():
    with pytest.raises(ValueError, match=r"options\.betas"):
        fit([ReplaceOptimizer("bitsandbytes.Lion")], module)
    with pytest.raises(ValueError, match="AdamW8bit"):
        fit([Optimizer8bit(), ReplaceOptimizer(**LION)], module)


def test_wrong_arguments(monkeypatch):
    with pytest.raises(ValueError, match="Choose from"):
        ReplaceOptimizer("Lion")
    with pytest.raises(ValueError, match=r"options\.lr"):
        ReplaceOptimizer("torch.AdamW", {"lr": 1.0})
    monkeypatch.setattr("lightning_memfit.extras.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'torchao: pip install "lightning-memfit\[torchao\]"'):
        ReplaceOptimizer("torchao.AdamW4bit")
