import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memfit.adapters.lora import adapted_layers
from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.chunked_loss import ChunkedLoss
from lightning_memfit.techniques.gradient_release import GradientRelease
from lightning_memfit.techniques.lora import Lora
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from lightning_memfit.techniques.quantized_weights import QuantizedWeights
from tests.contract.checkpointing.models import llama
from tests.contract.peaks import assert_predicted_peak_is_measured
from tests.contract.runs import LanguageModel, assert_same_weights, fit, loader, trainer

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SETTINGS = {
    "lora": [Lora(4)],
    "4bit": [QuantizedWeights(4), Lora(4)],
    "8bit": [QuantizedWeights(8), Lora(4)],
}


def scheduled(module):
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-2)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def model():
    return LanguageModel(scheduled, **NO_DROPOUT)


class Llama(LanguageModel):
    def __init__(self):
        super().__init__()
        self.model = llama()


@pytest.fixture(params=SETTINGS)
def callbacks(request):
    return copy.deepcopy(SETTINGS[request.param])


@pytest.mark.parametrize("make", [model, Llama])
def test_adapters_are_trained_and_stay_in_the_module(make, callbacks):
    pl_module = fit(callbacks, make, max_steps=7)
    assert pl_module.losses[6] < pl_module.losses[0]  # the same batch
    trained = {name for name, parameter in pl_module.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in pl_module.named_parameters() if ".lora_" in name}
    assert len(trained) == 2 * len(adapted_layers(pl_module))
    goes_on = fit(callbacks, lambda: pl_module, max_steps=7)
    assert goes_on.losses[7] < goes_on.losses[0]  # which goes on with what was learned


@pytest.mark.parametrize("make", [model, Llama])
def test_merged_it_is_the_plain_module_that_computes_what_was_learned(make):
    pl_module, pl_untouched = fit([Lora(4)], make, max_steps=7).eval(), fit([], make, max_steps=0)
    batch = next(iter(loader()))
    with torch.no_grad():
        expected = pl_module.model(batch).logits
        Lora.merge(pl_module)
        torch.testing.assert_close(pl_module.model(batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert not hasattr(pl_module, "peft_config")
    for (name, child), (_, other) in zip(pl_module.named_modules(), pl_untouched.named_modules(), strict=True):
        assert type(child) is type(other)
        assert vars(child).keys() == vars(other).keys(), name
    for (name, after), before in zip(pl_module.named_parameters(), pl_untouched.parameters(), strict=True):
        is_linear = after.ndim == 2 and not any(part in name for part in ("wte", "wpe", "embed", "lm_head"))
        assert torch.equal(after, before) != is_linear, name


@pytest.mark.nightly_cases("lora-bf16-true", "4bit-bf16-true", "8bit-bf16-mixed", "8bit-32")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_resume_is_bitwise_from_adapters_alone(tmp_path, callbacks, precision):
    def run(**kwargs):
        options = {"precision": precision, "max_steps": -1, "limit_train_batches": 2, **kwargs}
        return fit(copy.deepcopy(callbacks), model, **options)

    straight = run(max_epochs=3)
    run(max_epochs=1).seen["trainer"].save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt")
    assert all(".lora_" in name for name in saved["state_dict"])
    assert len(saved["optimizer_states"][0]["state"]) == len(saved["state_dict"])
    resumed = run(max_epochs=3, ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(torch.stack(resumed.losses), torch.stack(straight.losses[2:]))
    assert_same_weights(resumed, straight)


def test_quantized_weights_take_no_adapters():
    with pytest.raises(ValueError, match="weight in 4 or 8 bits, into which no adapter is merged"):
        Lora.merge(fit([QuantizedWeights(4), Lora(4)], model))


@pytest.mark.parametrize("others", [[Optimizer8bit()], [GradientRelease()], [ActivationCheckpointing(), ChunkedLoss()]])
def test_goes_with_other_techniques(callbacks, others):
    module = fit([*callbacks, *copy.deepcopy(others)], model)
    assert module.losses[-1] < module.losses[0]


@pytest.mark.nightly_cases("lora-32", "lora-bf16-mixed", "lora-bf16-true")
@pytest.mark.nightly_cases("4bit-32-true", "8bit-bf16-mixed", "8bit-bf16-true", "4bit-bf16-mixed", "8bit-32-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_predicted_peak_is_the_measured_one(callbacks, precision):
    assert_predicted_peak_is_measured(callbacks, scheduled, precision=precision)


def test_a_new_head_is_trained_as_a_whole():
    module = fit([Lora(4, target_modules=["c_attn"], train=["model.lm_head"])], lambda: LanguageModel(**NO_DROPOUT))
    before = fit([], lambda: LanguageModel(**NO_DROPOUT), max_steps=0)
    assert not torch.equal(module.model.lm_head.weight, before.model.lm_head.weight)
    assert torch.equal(module.model.transformer.h[0].mlp.c_fc.weight, before.model.transformer.h[0].mlp.c_fc.weight)


class Plain(LanguageModel):
    """No Hugging Face model, an odd layer size, and an optimizer over a part."""

    def __init__(self, part=None):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(64, 20), nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 64))
        self.part = part

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        part = self if self.part is None else self.get_submodule(self.part)
        return torch.optim.SGD(part.parameters(), lr=0.1)


def test_wrong_arguments_name_the_argument():
    with pytest.raises(ValueError, match="`alpha=0`"):
        Lora(alpha=0)
    with pytest.raises(ValueError, match="`rank=0`"):
        Lora(0)
    with pytest.raises(ValueError, match="List Lora beside it"):
        fit([QuantizedWeights(4)], model)
    with pytest.raises(AttributeError, match="haed"):
        fit([Lora(train=["haed"])], model)
    with pytest.raises(ValueError, match="`bits=3`"):
        QuantizedWeights(3)
    with pytest.raises(ValueError, match="for 'q_attn'.*c_attn"):
        fit([Lora(target_modules=["q_attn"])], model)
    with pytest.raises(ValueError, match=r"lm_head stays as it is: .*used in two places"):
        fit([QuantizedWeights(target_modules=["lm_head"]), Lora()], model)
    with pytest.raises(ValueError, match="lack adapters"):
        fit([Lora()], lambda: Plain("model.3"))


def test_setup_without_fit_changes_nothing():
    module, run = model(), trainer([Lora()])
    Lora().setup(run, module, "validate")
    assert not adapted_layers(module)
