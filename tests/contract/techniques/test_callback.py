"""When techniques change a module: outside of what Lightning enters around a `configure_model`."""

from contextlib import contextmanager

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_memfit.memory.wrapping import Layered
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.attention import AttentionKernel
from lightning_memfit.techniques.chunked_loss import ChunkedLoss
from lightning_memfit.techniques.core.facts import has_compiler
from lightning_memfit.techniques.lora import Lora
from lightning_memfit.techniques.quantized_weights import QuantizedWeights
from lightning_memfit.techniques.torch_compile import TorchCompile
from tests.contract.checkpointing.models import gpt2
from tests.contract.runs import loader, trainer


class Module(pl.LightningModule):
    """Has no `configure_model`; builds its network in `setup` if it is late."""

    def __init__(self, late=False):
        super().__init__()
        self.model = None if late else gpt2()

    def setup(self, stage):
        if self.model is None:
            self.model = gpt2()

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Configured(Module):
    def configure_model(self):
        """Be overridden."""


class NoNewLayers(Precision):
    """Refuses modules that make layers in `configure_model`, as BitsandbytesPrecision with `ignore_modules` does."""

    def module_init_context(self):
        raise RuntimeError("Instantiating your model under the init_module context manager is not supported")


class OtherLinear(nn.Linear):
    pass


class OtherLayers(Precision):
    """Has `configure_model` make layers of another class, as TransformerEnginePrecision does."""

    @contextmanager
    def module_init_context(self):
        own = nn.Linear
        torch.nn.Linear = OtherLinear
        try:
            yield
        finally:
            torch.nn.Linear = own


class BitsandbytesPrecision(Precision):
    """Stands for Lightning's, of which the name is looked at."""


TECHNIQUES = {
    "checkpointing": lambda: [ActivationCheckpointing()],
    "chunked_loss": lambda: [ChunkedLoss()],
    "attention": lambda: [AttentionKernel("eager")],
    "compile": lambda: [TorchCompile()],
    "several": lambda: [ActivationCheckpointing(), QuantizedWeights(8), Lora(2), ChunkedLoss()],
}


class Stop(pl.Callback):
    """Ends the run before its first step, which would compile."""

    def on_fit_start(self, trainer, pl_module):
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.max_steps = 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("callbacks", TECHNIQUES.values(), ids=TECHNIQUES)
def test_no_context_for_new_layers_is_entered_for_a_technique(callbacks, late):
    module, callbacks = Module(late), callbacks()
    if isinstance(callbacks[0], TorchCompile) and not has_compiler("cpu"):
        pytest.skip("needs a C++ compiler")
    trainer([*callbacks, Stop()], plugins=NoNewLayers()).fit(module, loader())
    assert not any(isinstance(value, Layered) for value in vars(module).values())


@pytest.mark.parametrize("callbacks", [[Lora(2)], [ChunkedLoss()]], ids=["lora", "loss"])
def test_layers_from_before_are_known_where_new_ones_have_another_class(callbacks):
    module = Configured()
    before = module.model.lm_head.weight.clone()
    trainer(callbacks, plugins=OtherLayers(), max_steps=1).fit(module, loader())
    assert type(module.model.lm_head) is nn.Linear
    assert torch.equal(module.model.lm_head.weight, before) == isinstance(callbacks[-1], Lora)


@pytest.mark.parametrize("callbacks", [[Lora(2)], [QuantizedWeights(8), Lora(2)]], ids=len)
def test_a_precision_that_would_replace_adapted_layers_is_refused(callbacks):
    with pytest.raises(ValueError, match="BitsandbytesPrecision replaces linear layers"):
        trainer(callbacks, plugins=BitsandbytesPrecision()).fit(Module(), loader())
