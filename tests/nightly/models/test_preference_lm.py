import math

import pytest
import torch

from lightning_memfit.data import StandardLibraryComparisons
from lightning_memfit.models import PreferenceLM
from lightning_memfit.techniques.chunked_loss import ChunkedLoss
from lightning_memfit.techniques.lora import Lora
from tests.helpers.trainers import quiet_trainer

TINY = {"model_type": "qwen3", "vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def built(**arguments):
    torch.manual_seed(0)
    module = PreferenceLM(config=TINY, **arguments)
    module.configure_model()
    return module


def some_batch():
    ids = torch.randint(0, 256, (3, 2, 10), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[..., :4] = -100
    labels[:, 1, -2:] = -100
    mask = torch.ones_like(ids)
    mask[:, 1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def moved(module):
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return module


def log_probability(network, ids, labels):
    """Of one sequence, without padding and by a softmax over all of it."""
    logs = network(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
    return sum(float(logs[at - 1, labels[at]]) for at in range(1, len(ids)) if labels[at] >= 0)


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
OPT = {"model_type": "opt", "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OPT |= {"max_position_embeddings": 16, "word_embed_proj_dim": 16}


@pytest.mark.parametrize(("config", "entry"), [(GPT2, "resid_pdrop"), (OPT, "dropout")], ids=["layers", "functions"])
def test_nothing_is_gained_before_the_first_step_in_training_either(config, entry):
    """The model's dropout would make noise of it: the reference has none."""
    torch.manual_seed(0)
    gains = []
    for chosen in ({}, {entry: 0.3}):
        own = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
        module = PreferenceLM(config={**config, **own, **chosen}, learning_rate=1e-3)
        module.configure_model()
        module.train()
        with torch.no_grad():
            gains.append(float(module._gains(some_batch()).abs().max()))
    assert gains[0] < 1e-4
    assert gains[1] > 1e-3, "what the user has chosen stays"


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_the_paper(smoothing):
    module, batch = moved(built(beta=0.3, label_smoothing=smoothing)), some_batch()
    expected = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        gains = [
            log_probability(module.model, one[:end], of[:end]) - log_probability(module.reference, one[:end], of[:end])
            for one, of, end in zip(ids, labels, (10, 8), strict=True)
        ]
        score = 0.3 * (gains[0] - gains[1])
        sides = [math.log1p(math.exp(-score)), math.log1p(math.exp(score))]
        expected.append((1 - smoothing) * sides[0] + smoothing * sides[1])
    assert module._loss(batch).item() == pytest.approx(sum(expected) / 3, rel=1e-4)


def test_no_gradient_reaches_the_reference():
    module = moved(built())
    module._loss(some_batch()).backward()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in module.reference.parameters())
    assert all(parameter.grad is not None for parameter in module.model.parameters())
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert counted == 2 * sum(parameter.numel() for parameter in module.model.parameters())


def test_a_copy_in_half_precision_is_the_model_rounded():
    module = built(reference_dtype="bfloat16")
    ours, theirs = module.model.state_dict(), module.reference.state_dict()
    assert all(torch.equal(ours[name].bfloat16(), theirs[name]) for name in ours)
    assert float(module._gains(some_batch()).abs().max()) < 0.5
    assert torch.get_default_dtype() is torch.float32


def test_the_reference_keeps_no_graph_and_its_mode():
    module = built()
    module.train()
    module._gains(some_batch())
    assert module.model.training
    module.reference.train()
    assert module._log_probabilities(module.reference, some_batch()).grad_fn is None


def fit(module, *callbacks, max_steps=3, overfit_batches=0):
    data = StandardLibraryComparisons(sequence_length=96, batch_size=4, max_files=15, num_workers=0)
    trainer = quiet_trainer(
        *callbacks,
        max_steps=max_steps,
        overfit_batches=overfit_batches,
        limit_val_batches=1,
        val_check_interval=None if overfit_batches else max_steps,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=data)
    return trainer


def test_adapters_are_left_out_for_the_reference():
    """Before the first step the model is its own reference; a copy of what it was stays one in all that follow."""
    seen = []

    class Watched(PreferenceLM):
        def _gains(self, batch):
            gains = super()._gains(batch)
            with torch.no_grad():
                mine = self._log_probabilities(self.network, batch) - self._log_probabilities(original.model, batch)
            seen.append((gains.detach(), mine))
            return gains

    original = built(reference="adapters_off")
    module = Watched(config=TINY, reference="adapters_off", learning_rate=1e-2)
    module.configure_model()
    module.model.load_state_dict(original.model.state_dict())
    fit(module, Lora(rank=4))
    assert float(seen[0][0].abs().max()) == 0
    assert float(seen[-1][0].abs().max()) > 0.1
    for gains, mine in seen:
        torch.testing.assert_close(gains, mine, atol=1e-4, rtol=1e-4)


def test_learns_and_logs_what_it_prefers():
    trainer = fit(built(learning_rate=1e-2), ChunkedLoss(), max_steps=30, overfit_batches=1)
    logged = trainer.callback_metrics
    assert logged["train_loss"] < 0.5  # log(2) = 0.69
    assert {"val_loss", "val_accuracy", "val_margin"} <= set(logged)


@pytest.mark.parametrize(
    ("arguments", "callbacks", "message"),
    [
        ({"reference": "adapters_off"}, [], "needs adapters, and there are none"),
        ({"reference": "copy"}, [Lora()], "holds the frozen weights twice"),
        ({"reference": "adapters_off"}, [Lora(train=["model.lm_head"])], "is trained beside the adapters"),
    ],
)
def test_a_reference_that_is_none_is_refused(arguments, callbacks, message):
    with pytest.raises(ValueError, match=message):
        fit(built(**arguments), *callbacks)


def test_merged_adapters_have_no_reference():
    module = built(reference="adapters_off")
    data = StandardLibraryComparisons(sequence_length=96, batch_size=4, max_files=15, num_workers=0)
    with pytest.raises(ValueError, match="only `copy` has a reference"):
        quiet_trainer(limit_val_batches=1).validate(module, data, verbose=False)


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_checkpoint_has_the_reference_only_if_it_is_nowhere_else(tmp_path, pretrained):
    """A resumed run compares with the same model as before."""
    if pretrained:
        built().model.save_pretrained(tmp_path / "base")
    arguments = {"pretrained": str(tmp_path / "base")} if pretrained else {"config": TINY}
    torch.manual_seed(3)
    module = PreferenceLM(**arguments)
    module.configure_model()
    moved(module)
    checkpoint = {"state_dict": dict(module.state_dict())}
    module.on_save_checkpoint(checkpoint)
    assert any(name.startswith("reference.") for name in checkpoint["state_dict"]) is not pretrained
    torch.manual_seed(4)
    again = PreferenceLM(**arguments)
    again.configure_model()
    again.on_load_checkpoint(checkpoint)
    again.load_state_dict(checkpoint["state_dict"])
    for name in ("model", "reference"):
        ours, theirs = (dict(getattr(one, name).named_parameters()) for one in (again, module))
        assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == [], name
        # No checkpoint has these: transformers computes them as it builds a model.
        ours, theirs = (dict(getattr(one, name).named_buffers()) for one in (again, module))
        for key, values in theirs.items():
            assert ours[key].tolist() == values.tolist(), (name, key)
    batch = some_batch()
    assert torch.equal(again._gains(batch), module._gains(batch))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": -1.0}, "`beta=-1.0` must be between"),
        ({"label_smoothing": 0.7}, "`label_smoothing=0.7` must be between 0.0 and 0.5"),
        ({"reference": "none"}, "`reference='none'` is unknown"),
        ({"reference_dtype": "int8"}, "`reference_dtype='int8'` is unknown"),
        ({"reference": "adapters_off", "reference_dtype": "bfloat16"}, "is for `reference: copy`"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PreferenceLM(config=TINY, **arguments)
