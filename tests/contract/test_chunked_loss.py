import copy
import io

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memfit import Lora, MicroBatching
from lightning_memfit.adapters.quantized import quantized
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.chunked_loss import ChunkedLoss, chunk_loss, find_causal_models
from tests.contract.checkpointing.models import gpt2, make, vit
from tests.contract.chunked_models import MODELS, build
from tests.contract.runs import LanguageModel, fit
from tests.helpers.trainers import fit_on_two_ranks, quiet_trainer

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(5))


def run(model, batch, **kwargs):
    torch.manual_seed(7)
    output = model(**batch, **kwargs)
    model.zero_grad()
    output.loss.backward()
    return output, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(ours, theirs, rtol=1e-4, atol=1e-6):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ChunkedLoss. `close`")
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
    assert output.keys() == expected.keys()
    assert torch.equal(output.hidden_states[-1], expected.hidden_states[-1])
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_close(gradients, expected_gradients)
    restore()
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(run(model, batch, **arguments)[0].logits, expected.logits)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name):
    """Encoder-decoders, soft caps, scales, biases, log-softmax: each gets to its loss in its own way."""
    model, batch = build(name)
    expected, expected_gradients = run(model, batch)
    restore = chunk_loss(model, 3)
    output, gradients = run(model, batch)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_close(gradients, expected_gradients, rtol=1e-3)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    output, gradients = run(model, nothing)
    assert output.loss == 0
    assert not any(gradient.any() for gradient in gradients if gradient is not None)
    model.eval()
    with torch.no_grad():
        output = model(**batch)
        restore()
        expected = model(**batch)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=0)


def test_other_ways_to_give_labels():
    model, batch = make("gpt2")
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    expected, _ = run(copy.deepcopy(model), batch, shift_labels=shifted)
    chunk_loss(model)
    torch.testing.assert_close(run(model, batch, shift_labels=shifted)[0].loss, expected.loss)
    model.eval()
    by_position = model(batch["input_ids"], *[None] * 7, batch["labels"])
    loss, *_ = model(**batch, return_dict=False)
    torch.testing.assert_close(by_position.loss, model(**batch).loss)
    torch.testing.assert_close(loss, by_position.loss)


def test_evaluation_has_logits():
    model, batch = make("gpt2")
    model.eval()
    with torch.no_grad():
        expected = model(**batch)
        chunk_loss(model)
        output = model(**batch)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
        assert type(model(batch["input_ids"]).logits) is torch.Tensor
    assert model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 18)


def adapted(dropout):
    def change(model):
        from peft import LoraConfig, get_peft_model

        get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn", "lm_head"], lora_dropout=dropout))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)

    return change


def head_of(make_head):
    def change(model):
        model.lm_head = make_head()

    return change


def frozen(model):
    model.requires_grad_(False)
    model.transformer.wpe.requires_grad_(True)


def normed(model):
    nn.utils.parametrizations.weight_norm(model.lm_head)


class OfAllTokens(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden - hidden.mean(dim=tuple(range(hidden.ndim - 1)), keepdim=True))


class Noisy(nn.Linear):
    def forward(self, hidden):
        return super().forward(F.dropout(hidden, 0.3))


HEADS = {
    "bias": head_of(lambda: nn.Linear(32, 64)),
    "frozen": frozen,
    "4 bits": head_of(lambda: quantized(nn.Linear(32, 64), 4)),
    "8 bits": head_of(lambda: quantized(nn.Linear(32, 64), 8)),
    "adapter": adapted(0.0),
    "weight norm": normed,
}


def changed(change):
    torch.manual_seed(0)
    model = gpt2(**NO_DROPOUT).train()
    change(model)
    return model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("name", HEADS)
def test_other_heads(name):
    if name == "4 bits":
        pytest.importorskip("bitsandbytes")
    model = changed(HEADS[name])
    batch = {"input_ids": IDS, "labels": IDS}
    expected, expected_gradients = run(copy.deepcopy(model), batch)
    chunk_loss(model, 3)
    output, gradients = run(model, batch)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_close(gradients, expected_gradients, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [lambda model: None, adapted(0.0)])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_autocast(dtype, change):
    model = changed(change)
    batch = {"input_ids": IDS, "labels": IDS}
    with torch.autocast("cpu", dtype):
        expected, expected_gradients = run(copy.deepcopy(model), batch)
        chunk_loss(model, 3)
        output, gradients = run(model, batch)
    assert output.loss.dtype is expected.loss.dtype
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    assert_close(gradients, expected_gradients, rtol=5e-2, atol=4e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_activation_checkpointing(reentrant):
    model = gpt2(**NO_DROPOUT).train()
    expected, expected_gradients = run(copy.deepcopy(model), {"input_ids": IDS, "labels": IDS})
    chunk_loss(model, 3)
    embedded = lambda e: model(inputs_embeds=e, labels=IDS).loss  # noqa: E731
    loss = checkpoint(embedded, model.transformer.wte(IDS), use_reentrant=reentrant)
    loss.backward()
    torch.testing.assert_close(loss, expected.loss)
    assert_close([p.grad for p in model.parameters()], expected_gradients)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly_cases("<lambda>-is compiled")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (head_of(lambda: OfAllTokens(32, 64)), "OfAllTokens"),
        (head_of(lambda: Noisy(32, 64)), "Noisy"),
        (adapted(0.1), r"dropout \(0.1\)"),
        (lambda model: model.lm_head.register_full_backward_hook(lambda *args: None), "hooks on its gradients"),
        (lambda model: setattr(model, "_loss_function", class_weighted), "`cross_entropy\\(weight=...\\)`"),
        (lambda model: setattr(model, "_loss_function", another_loss), "`sum` to its logits"),
        pytest.param(lambda model: model.compile(backend="eager"), "is compiled"),
    ],
)
def test_what_is_not_exact_is_refused(change, reason):
    model = changed(change)
    chunk_loss(model, 3)
    with pytest.raises(ValueError, match=f"ChunkedLoss: GPT2LMHeadModel .*{reason}"):
        model(input_ids=IDS, labels=IDS)


def class_weighted(logits, labels, **_):
    return F.cross_entropy(logits.transpose(1, 2), labels, weight=torch.rand(logits.shape[-1]))


def another_loss(logits, labels, **_):
    return logits.pow(2).sum()  # `pow` is done to every token alike, `sum` is not


def test_other_modules_are_refused():
    for module in (vit(), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="causal language model"):
            find_causal_models(module)


def test_wrong_arguments_and_models():
    class Flat(LanguageModel):
        def configure_model(self):
            self.model = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="num_chunks=0"):
        ChunkedLoss(0)
    with pytest.raises(ValueError, match="Flat holds no"):
        fit([ChunkedLoss()], Flat)


# --- modules that compute the loss themselves -------------------------------------------------------------------------


class OwnLoss(LanguageModel):
    def __init__(self):
        super().__init__(**NO_DROPOUT)

    def loss(self, logits, ids):
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], label_smoothing=0.1)

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.model(batch).logits, batch)
        self.losses.append(loss.detach())
        return loss


class OtherLoss(OwnLoss):
    def loss(self, logits, ids):
        return logits.logsumexp(-1).mean()


class Accuracy(OwnLoss):
    def loss(self, logits, ids):
        self.seen["accuracy"] = (logits.argmax(-1) == ids).float().mean()
        return super().loss(logits, ids)


def test_own_cross_entropy():
    plain, ours = fit([], OwnLoss), fit([ChunkedLoss(3)], OwnLoss)
    assert_close(ours.losses, plain.losses, rtol=1e-5)


def test_logits_may_be_read_in_training():
    plain = fit([], Accuracy)
    with pytest.warns(UserWarning, match="`argmax` reads the logits"):
        ours = fit([ChunkedLoss(3)], Accuracy)
    assert ours.seen["accuracy"] == plain.seen["accuracy"]
    assert_close(ours.losses, plain.losses, rtol=1e-5)


def test_another_loss_is_refused_before_a_weight_changes():
    module = OtherLoss()
    before = copy.deepcopy(module.state_dict())
    with (
        pytest.warns(UserWarning, match="`logsumexp` reads the logits"),
        pytest.raises(MisconfigurationException, match="`logsumexp` read them"),
    ):
        fit([ChunkedLoss()], lambda: module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.1 * gradient


def reversed_too(apply):
    class Adversarial(OwnLoss):
        def loss(self, logits, ids):
            return super().loss(logits, ids) + 3 * super().loss(apply(logits), ids)

    return Adversarial


@pytest.mark.parametrize("apply", [lambda x: Reversed.apply(x), Reversed.apply, lambda x: checkpoint(
    lambda y: y * 2, x, use_reentrant=True)])  # fmt: skip
def test_backward_of_a_custom_function(apply):
    before = vars(torch.autograd.function._SingleLevelFunction).get("apply")
    plain = fit([], reversed_too(apply))
    with pytest.warns(UserWarning, match=r"Function.apply|Reversed.apply"):
        ours = fit([ChunkedLoss(3)], reversed_too(apply))
    assert_close(ours.losses, plain.losses, rtol=1e-5)
    assert vars(torch.autograd.function._SingleLevelFunction).get("apply") == before


class Reference(OwnLoss):
    """Keeps a frozen copy of its model, made in the run."""

    pickled = False

    def on_train_start(self):
        copied = copy.deepcopy(self.model)
        if self.pickled:
            file = io.BytesIO()
            torch.save(self.model, file)
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        assert copied.lm_head.weight.data_ptr() != self.model.lm_head.weight.data_ptr()
        object.__setattr__(self, "reference", copied.train())
        self.norms = []

    def loss(self, logits, ids):
        own = self.reference(input_ids=ids, labels=ids)
        assert type(own.logits) is torch.Tensor
        self.norms.append(self.reference(IDS).logits.detach().norm())
        return super().loss(logits, ids) + own.loss.detach()


class PickledReference(Reference):
    pickled = True


@pytest.mark.parametrize("module", [Reference, PickledReference])
def test_a_copy_of_the_model_has_its_own_head(module):
    plain, ours = fit([], module), fit([ChunkedLoss(3)], module)
    assert len({float(norm) for norm in ours.norms}) == 1
    assert_close(ours.norms, plain.norms)
    assert_close(ours.losses, plain.losses, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
def test_averaged_weights_in_both_orders(first):
    averaging = pytest.importorskip("lightning.pytorch.callbacks").EMAWeightAveraging
    plain = fit([averaging()], OwnLoss)
    callbacks = [ChunkedLoss(3), averaging()]
    ours = fit(callbacks[first:] + callbacks[:first], OwnLoss)
    assert_close(ours.losses, plain.losses, rtol=1e-5)


class WritesData(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad.data, alpha=-0.1)


class ReadLater(OwnLoss):
    def training_step(self, batch, batch_idx):
        logits = self.model(batch).logits
        loss = self.loss(logits, batch)
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["logits"].double().mean())

    def configure_optimizers(self):
        return WritesData(self.parameters(), lr=0.1)


class ReadLaterAdamW(ReadLater):
    def configure_optimizers(self):
        return OwnLoss.configure_optimizers(self)


@pytest.mark.parametrize("module", [ReadLater, ReadLaterAdamW])
def test_logits_read_after_the_step_are_those_before_it(module):
    plain = fit([], module)
    with pytest.warns(UserWarning, match="kept beyond the step"):
        ours = fit([ChunkedLoss(3)], module)
    assert_close(ours.losses, plain.losses, rtol=1e-5)


def test_logits_read_after_a_manual_step_are_refused():
    class Manual(ReadLater):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            logits = self.model(batch).logits
            self.manual_backward(self.loss(logits, batch))
            self.optimizers().step(lambda: None)
            logits.sum()

    with pytest.raises(RuntimeError, match="before the optimizer's step"):
        fit([ChunkedLoss(3)], Manual)


def test_a_second_backward_pass_is_refused_in_words():
    class Twice(OwnLoss):
        def loss(self, logits, ids):
            loss = super().loss(logits, ids)
            torch.autograd.grad(loss, self.model.transformer.wpe.weight, retain_graph=True)
            return loss

    with pytest.raises(RuntimeError, match="ChunkedLoss .* second backward"):
        fit([ChunkedLoss(3)], Twice)


def test_listed_twice():
    with pytest.raises(MisconfigurationException, match="listed twice"):
        fit([ChunkedLoss(), ChunkedLoss()], OwnLoss)


def test_a_head_of_several_layers_is_refused_in_words():
    class Deep(OwnLoss):
        def configure_model(self):
            super().configure_model()
            self.model.lm_head = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))

    with pytest.raises(ValueError, match="one linear output head"):
        fit([ChunkedLoss()], Deep)


def test_an_adapter_in_an_untied_head():
    class Untied(OwnLoss):
        def __init__(self):
            super().__init__()
            self.configure_model()
            self.model.config.tie_word_embeddings = False
            self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())

    def adapted_head():
        return Lora(target_modules=["lm_head"])

    plain, ours = fit([adapted_head()], Untied), fit([adapted_head(), ChunkedLoss(3)], Untied)
    assert_close(ours.losses, plain.losses, rtol=1e-5)


# --- batches in which no token counts ---------------------------------------------------------------------------------

ROWS = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(3))
LABELS = ROWS.clone()
LABELS[::3, 8:] = -100
LABELS[[1, 2, 4, 5, 6, 7, 9, 12, 13, 14, 15]] = -100  # single samples, and whole batches of 4


class Rows(pl.LightningModule):
    """SGD, so that every gradient shows in the weights; each rank reads its part of a global batch."""

    def __init__(self, batch_size=4, num_items=False):
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt2(n_layer=1, **NO_DROPOUT).double()
        self.batch_size = batch_size
        self.num_items = num_items

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        items = {"num_items_in_batch": (labels[:, 1:] != -100).sum()} if self.num_items else {}
        return self.model(input_ids=ids, labels=labels, **items).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        pairs = list(zip(ROWS, LABELS, strict=True))
        ranks = self.trainer.world_size
        whole = [pairs[i : i + self.batch_size * ranks] for i in range(0, len(pairs), self.batch_size * ranks)]
        mine = [
            pair for batch in whole for pair in batch[self.trainer.global_rank * self.batch_size :][: self.batch_size]
        ]
        return DataLoader(mine, batch_size=self.batch_size)


def reference(batch_size, means_of=None):
    """Plain torch: the mean over the tokens that count, or over ranks the mean of `means_of` such means."""
    module = Rows()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for start in range(0, len(ROWS), batch_size):
        optimizer.zero_grad()
        size = batch_size // (means_of or 1)
        for first in range(start, start + batch_size, size):
            labels = LABELS[first : first + size, 1:]
            logits = module.model(input_ids=ROWS[first : first + size]).logits[:, :-1].float()
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (total / (labels != -100).sum().clamp(min=1) / (means_of or 1)).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("num_items", [False, True])
def test_masked_batches_change_nothing(num_items):
    module = Rows(num_items=num_items)
    quiet_trainer(ChunkedLoss(3), max_epochs=1).fit(module)
    assert_close(module.parameters(), reference(4), atol=1e-7)


def test_masked_micro_batches_count_as_zero():
    module = Rows(batch_size=8)
    quiet_trainer(ChunkedLoss(3), MicroBatching(micro_batch_size=1), max_epochs=1).fit(module)
    assert_close(module.parameters(), reference(8), atol=1e-7)


def test_masked_batches_in_accumulation_count_as_zero():
    module = Rows()
    quiet_trainer(ChunkedLoss(3), max_epochs=1, accumulate_grad_batches=2).fit(module)
    assert_close(module.parameters(), reference(8, means_of=2), atol=1e-7)


@pytest.mark.parametrize("micro_batching", [False, True])
def test_a_rank_whose_batch_is_masked(micro_batching, tmp_path):
    callbacks = [ChunkedLoss(3), *([MicroBatching(micro_batch_size=2)] if micro_batching else [])]
    (first, _), (second, _) = fit_on_two_ranks(Rows(), tmp_path, *callbacks, max_epochs=1)
    expected = reference(8, means_of=None if micro_batching else 2)
    assert_close(first, second, 0, 0)
    assert_close(first, expected, atol=1e-7)


# --- memory and runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bart", "gemma2"])
def test_peak_without_whole_logits(fake, name):
    def peak(chunked):
        with FakeTensorMode() if fake else torch.enable_grad():
            model = gpt2(vocab_size=4096, n_layer=1, n_positions=128) if name == "gpt2" else MODELS[name](4096)
            if chunked:
                chunk_loss(model.train(), 32)
            if name == "bart":
                # LayerDrop of transformers up to 5.17 asks for the value of a random number, which a fake one lacks.
                model.model.encoder.training = model.model.decoder.training = False
            ids = torch.ones(2, 128, dtype=torch.long)
            with StorageLedger() as ledger:
                ledger.track_module(model)
                before = ledger.live_bytes
                model(input_ids=ids, labels=ids).loss.backward()
        ledger.close()
        return ledger.peak_bytes - before

    logits = 2 * 128 * 4096 * 4
    assert peak(False) > 2 * logits
    assert peak(True) < 0.8 * logits


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_trains(precision):
    plain = fit([], precision=precision)
    ours = fit([ChunkedLoss(7), ActivationCheckpointing()], precision=precision)
    assert vars(ours).keys() == vars(plain).keys()
    assert "forward" not in vars(ours.model.lm_head)
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(plain.losses), rtol=2e-3, atol=0)


# --- weights that only the head's call sees ---------------------------------------------------------------------------


class Functional(OwnLoss):
    def training_step(self, batch, batch_idx):
        weights = {"lm_head.weight": self.model.lm_head.weight * 2}
        loss = self.loss(torch.func.functional_call(self.model, weights, (batch,)).logits, batch)
        self.losses.append(loss.detach())
        return loss


class Swapped(OwnLoss):
    def training_step(self, batch, batch_idx):
        mine = self.model.lm_head.weight
        self.model.lm_head.weight = torch.nn.Parameter(mine.detach() * 2)
        logits = self.model(batch).logits
        self.model.lm_head.weight = mine
        loss = self.loss(logits, batch)
        self.losses.append(loss.detach())
        return loss


class SpectralNorm(OwnLoss):
    def __init__(self):
        super().__init__()
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        torch.nn.utils.parametrizations.spectral_norm(self.model.lm_head)


@pytest.mark.parametrize("module", [Functional, Swapped, SpectralNorm])
def test_the_loss_uses_the_weight_that_the_heads_call_saw(module):
    plain, ours = fit([], module), fit([ChunkedLoss(3)], module)
    assert_close(ours.losses, plain.losses, rtol=1e-5)
    assert_close(list(ours.buffers()), list(plain.buffers()), atol=1e-5)


class Counting(nn.Linear):
    """Changes a buffer in each call."""

    def __init__(self, *args):
        super().__init__(*args, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_a_head_that_changes_its_buffers_is_refused():
    model = changed(head_of(lambda: Counting(32, 64)))
    chunk_loss(model, 3)
    with pytest.raises(ValueError, match="Counting.* changes its buffers"):
        model(input_ids=IDS, labels=IDS)


class WeightedLoss(OwnLoss):
    def loss(self, logits, ids):
        return F.cross_entropy(logits.transpose(1, 2), ids, weight=torch.ones(logits.shape[-1]))


class InPlace(OwnLoss):
    def loss(self, logits, ids):
        logits += 0.1
        return super().loss(logits, ids)


@pytest.mark.parametrize(("module", "reason"), [(WeightedLoss, r"weight=\.\.\."), (InPlace, "`logits = logits")])
@pytest.mark.filterwarnings("ignore:ChunkedLoss")
def test_a_refusal_names_the_argument_and_the_way_out(module, reason):
    with pytest.raises(MisconfigurationException, match=reason):
        fit([ChunkedLoss(3)], module)


def test_a_label_out_of_range_is_named():
    model = changed(lambda model: None)
    chunk_loss(model, 3)
    labels = IDS.clone()
    labels[0, 3] = 64
    with pytest.raises(IndexError, match="labels .* hold 64, but the logits have 64 classes"):
        model(input_ids=IDS, labels=labels)
