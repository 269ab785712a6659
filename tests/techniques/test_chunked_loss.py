import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.chunked_loss import ChunkedLoss, chunk_loss, find_causal_models
from tests.techniques.runs import LanguageModel, fit
from tests.unit.checkpointing.models import bert, gpt2, make


def run(model, batch, **kwargs):
    torch.manual_seed(7)
    output = model(**batch, **kwargs)
    model.zero_grad()
    output.loss.backward()
    return output, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("arguments", [{}, {"num_items_in_batch": 11}, {"num_items_in_batch": torch.tensor(11)}])
def test_loss_gradients_and_output(name, arguments):
    model, batch = make(name)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 3:7] = -100
    expected, expected_gradients = run(copy.deepcopy(model), batch, output_hidden_states=True, **arguments)
    run(model, batch, output_hidden_states=True)  # transformers adds attributes in the first call
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    restore = chunk_loss(model, num_chunks=5)
    output, gradients = run(model, batch, output_hidden_states=True, **arguments)
    assert type(output) is type(expected)
    assert output.logits is None
    assert torch.equal(output.hidden_states[-1], expected.hidden_states[-1])
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    restore()
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    assert not model._forward_hooks
    assert torch.equal(run(model, batch, **arguments)[0].logits, expected.logits)


def test_shifted_labels():
    model, batch = make("gpt2")
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    expected, _ = run(copy.deepcopy(model), batch, shift_labels=shifted)
    chunk_loss(model)
    torch.testing.assert_close(run(model, batch, shift_labels=shifted)[0].loss, expected.loss)


def test_without_labels_there_are_logits():
    model, batch = make("gpt2")
    model.eval()
    expected = model(batch["input_ids"]).logits
    chunk_loss(model)
    assert torch.equal(model(batch["input_ids"]).logits, expected)
    assert model(**batch).logits is None
    assert model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 18)


def test_labels_given_by_position():
    model, batch = make("gpt2")
    model.eval()
    expected = model(**batch).loss
    chunk_loss(model)
    output = model(batch["input_ids"], *[None] * 7, batch["labels"])
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected)


def test_logits_that_are_changed_before_the_loss_are_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=32, vocab_size=64, final_logit_softcapping=30.0, use_cache=False,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    chunk_loss(model)
    ids = torch.ones(1, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="soft-capping"):
        model(input_ids=ids, labels=ids)


def test_other_modules_are_refused():
    for module in (bert(), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="causal language model"):
            find_causal_models(module)
    model, batch = make("gpt2")
    chunk_loss(model)
    with pytest.raises(ValueError, match="return_dict"):
        model(**batch, return_dict=False)


@pytest.mark.parametrize("fake", [False, True])
def test_peak_without_whole_logits(fake):
    def peak(chunked):
        with FakeTensorMode() if fake else torch.enable_grad():
            model = gpt2(vocab_size=4096, n_layer=1, n_positions=128)
            if chunked:
                chunk_loss(model, 32)
            ids = torch.ones(2, 128, dtype=torch.long)
            with StorageLedger() as ledger:
                ledger.track_module(model)
                before = ledger.live_bytes
                model(input_ids=ids, labels=ids).loss.backward()
        ledger.close()
        return ledger.peak_bytes - before

    logits = 2 * 128 * 4096 * 4
    assert peak(False) > 2 * logits
    assert peak(True) < 0.75 * logits


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_trains(precision):
    plain = fit([], precision=precision)
    ours = fit([ChunkedLoss(7), ActivationCheckpointing()], precision=precision)
    assert vars(ours).keys() == vars(plain).keys()
    assert "forward" not in vars(ours.model.lm_head)
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(plain.losses), rtol=2e-3, atol=0)


def test_wrong_arguments_and_models():
    class Flat(LanguageModel):
        def configure_model(self):
            self.model = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="num_chunks=0"):
        ChunkedLoss(0)
    with pytest.raises(ValueError, match="Flat holds no"):
        fit([ChunkedLoss()], Flat)
