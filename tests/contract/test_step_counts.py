"""A steady step costs about what the plain one does, counted in Python calls and operators, on any machine the same."""

import sys

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memfit.measure.data_wait import DataWaitMonitor
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.measure.utilization import FlopsMonitor
from lightning_memfit.optim.float32_step import Float32Step
from lightning_memfit.optim.host_master import HostMaster
from lightning_memfit.reliability.non_finite import NonFiniteGuard
from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.gradient_release import GradientRelease
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.contract.checkpointing.models import gpt2
from tests.contract.runs import LanguageModel, fit

pytestmark = pytest.mark.own_process

SIZES = {"n_layer": 12, "n_embd": 64, "n_head": 4}
STEADY = 4  # neither among the first steps nor one of those that are looked at now and then


class CountCalls(pl.Callback):
    """Counts the Python calls between the begin of one batch and that of the next."""

    calls = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == STEADY:
            sys.setprofile(self.count)
        elif batch_idx == STEADY + 1:
            sys.setprofile(None)

    def count(self, frame, event, argument):
        self.calls += event == "call"


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(*callbacks):
    counter = CountCalls()
    fit([*callbacks, counter], lambda: LanguageModel(**SIZES), precision="bf16-true", max_steps=STEADY + 2)
    return counter.calls


@pytest.fixture(scope="module")
def plain():
    return calls_of_a_step()


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda: [StochasticRounding()], 1.9),
        (lambda: [HostMasterWeights()], 1.2),
        (lambda: [GradientRelease()], 3.2),  # torchtune's optimizer for each parameter: 4.1
        (lambda: [Optimizer8bit()], 3.8),  # bitsandbytes' own optimizer: 2.8 of AdamW's whole step
        (lambda: [Optimizer8bit(), StochasticRounding()], 4.6),
        (lambda: [MemoryMonitor()], 1.05),
        (lambda: [DataWaitMonitor()], 1.05),
        (lambda: [FlopsMonitor()], 1.05),
        (lambda: [NonFiniteGuard()], 1.1),
    ],
    ids=["rounding", "host", "release", "8bit", "8bit-rounding", "memory", "wait", "flops", "non-finite"],
)
def test_python_calls_of_a_step(plain, make, factor):
    assert calls_of_a_step(*make()) <= factor * plain


def operators_of_a_step(make):
    model = gpt2(**SIZES).bfloat16()
    optimizer = make(torch.optim.AdamW(model.parameters(), foreach=True))
    tokens = torch.arange(32).view(2, 16)
    for _ in range(STEADY):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        with Operators() as operators:
            optimizer.step()
    return operators.number


def with_masters(optimizer):
    optimizer.host = HostMaster(optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("make", "factor"),
    [(Float32Step, 2.1), (with_masters, 1.1)],
    ids=["rounding", "host"],
)
def test_operators_of_an_optimizer_step(make, factor):
    assert operators_of_a_step(make) <= factor * operators_of_a_step(lambda optimizer: optimizer)
