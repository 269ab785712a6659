import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memfit import FullyShardedStrategy, MicroBatching
from lightning_memfit.adapters.quantized import quantized
from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.chunked_loss import ChunkedHead, ChunkedLoss, find_causal_models
from tests.contract.checkpointing.models import gpt2, make, vit
from tests.contract.chunked_models import MODELS, build
from tests.contract.runs import LanguageModel, fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
REFUSED = {"prophetnet": "applies `"}
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


def chunk_loss(model, num_chunks=8):
    return ChunkedHead([model], num_chunks).restore


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
    assert isinstance(output, type(expected))
    assert output.keys() == expected.keys()
    assert torch.equal(output.hidden_states[-1], expected.hidden_states[-1])
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_close(gradients, expected_gradients)
    restore()
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(run(model, batch, **arguments)[0].logits, expected.logits)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - REFUSED.keys()))
def test_every_kind_of_model(name):
    """Encoder-decoders, soft caps, scales, biases: each gets to its loss in its own way."""
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


def head_of(make_head):
    def change(model):
        model.lm_head = make_head()

    return change


def frozen(model):
    model.requires_grad_(False)
    model.transformer.wpe.requires_grad_(True)


def normed(model):
    nn.utils.parametrizations.weight_norm(model.lm_head)


HEADS = {
    "bias": head_of(lambda: nn.Linear(32, 64)),
    "frozen": frozen,
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
    model = changed(HEADS[name])
    batch = {"input_ids": IDS, "labels": IDS}
    expected, expected_gradients = run(copy.deepcopy(model), batch)
    chunk_loss(model, 3)
    output, gradients = run(model, batch)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_close(gradients, expected_gradients, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bart", "gemma2"])
def test_autocast(dtype, name):
    model, batch = build(name)
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
        (lambda model: setattr(model, "_loss_function", class_weighted), r"`cross_entropy\(weight=...\)`"),
        (lambda model: setattr(model, "_loss_function", another_loss), "`pow` to its logits"),
        pytest.param(lambda model: model.compile(backend="eager"), "is compiled"),
    ],
)
def test_what_is_not_exact_is_refused(change, reason):
    model = changed(change)
    chunk_loss(model, 3)
    with pytest.raises(ValueError, match=f"ChunkedLoss: GPT2LMHeadModel .*{reason}"):
        model(input_ids=IDS, labels=IDS)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_that_computes_something_else_is_refused(bits):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match=rf"GPT2LMHeadModel has a Linear{bits}bit for a head"):
        chunk_loss(changed(head_of(lambda: quantized(nn.Linear(32, 64), bits))))


def class_weighted(logits, labels, **_):
    return F.cross_entropy(logits.view(-1, 64), labels.view(-1), weight=torch.rand(64))


def another_loss(logits, labels, **_):
    return logits.pow(2).sum()


@pytest.mark.parametrize("name", REFUSED)
def test_kinds_of_models_that_are_refused(name):
    model, batch = build(name)
    chunk_loss(model, 3)
    with pytest.raises(ValueError, match=f"ChunkedLoss: {type(model).__name__} .*({REFUSED[name]})"):
        model(**batch)


def test_other_modules_are_refused():
    for module in (vit(), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="causal language model"):
            find_causal_models(module)


# --- modules ----------------------------------------------------------------------------------------------------------


class Labelled(LanguageModel):
    def __init__(self):
        super().__init__(**NO_DROPOUT)


class OwnLoss(Labelled):
    def training_step(self, batch, batch_idx):
        logits = self.model(batch).logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:])


def test_a_module_that_computes_its_own_loss_is_told_what_to_call_before_a_weight_changes():
    module = OwnLoss()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(MisconfigurationException, match=r"OwnLoss .*GPT2LMHeadModel.*`lightning_memfit\.linear_"):
        fit([ChunkedLoss()], lambda: module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_logits_may_be_read_in_training(precision):
    class Accuracy(Labelled):
        def training_step(self, batch, batch_idx):
            output = self.model(input_ids=batch, labels=batch)
            self.seen["accuracy"] = (output.logits.argmax(-1) == batch).float().mean()
            loss = output[0] + output["logits"].logsumexp(-1).square().mean()
            self.losses.append(loss.detach())
            return loss

    plain, ours = fit([], Accuracy, precision=precision), fit([ChunkedLoss(3)], Accuracy, precision=precision)
    assert ours.seen["accuracy"] == plain.seen["accuracy"]
    assert_close(ours.losses, plain.losses, rtol=1e-5 if precision == "32-true" else 1e-2)


def test_logits_are_not_read_after_the_step():
    class ReadsLate(Labelled):
        def training_step(self, batch, batch_idx):
            self.output = self.model(input_ids=batch, labels=batch)
            return self.output.loss

        def on_train_batch_end(self, *args):
            self.output.logits.sum()

    with pytest.raises(RuntimeError, match="after the optimizer's step"):
        fit([ChunkedLoss(3)], ReadsLate)


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


def train_masked(micro_batching):
    """Train on this process's rank; the batches of one are masked."""
    module = Rows()
    callbacks = [ChunkedLoss(3), *([MicroBatching(micro_batch_size=2)] if micro_batching else [])]
    quiet_trainer(*callbacks, strategy="ddp", devices=2, max_epochs=1).fit(module)
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("micro_batching", [False, True])
def test_a_rank_whose_batch_is_masked(micro_batching, tmp_path):
    ended = run_ranks(train_masked, 2, tmp_path, micro_batching)
    assert [one.code for one in ended] == [0, 0], ended[0].output[-3000:] + ended[1].output[-3000:]
    first, second = (one.result for one in ended)
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


# --- weights that only the head's call sees ---------------------------------------------------------------------------


class SpectralNorm(Labelled):
    def __init__(self):
        super().__init__()
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        torch.nn.utils.parametrizations.spectral_norm(self.model.lm_head)


def test_the_loss_uses_the_weight_that_the_heads_call_saw():
    plain, ours = fit([], SpectralNorm), fit([ChunkedLoss(3)], SpectralNorm)
    assert_close(ours.losses, plain.losses, rtol=1e-5)
    assert_close(list(ours.buffers()), list(plain.buffers()), atol=1e-5)


def test_fsdp2_reads_no_logits_of_what_its_root_returns():
    class CallsItself(LanguageModel):
        def forward(self, batch):
            return self.model(input_ids=batch, labels=batch)

        def training_step(self, batch, batch_idx):
            return self(batch).loss

    batch = torch.zeros(2, 128, dtype=torch.long)
    peaks = [
        predict_peak_bytes(
            profile_module(
                CallsItself(None, vocab_size=8192, n_positions=128),
                batch,
                emulation=Emulation(device="cpu"),
                ranks=Ranks(FullyShardedStrategy, 2),
                callbacks=callbacks,
            ),
            2,
        )
        for callbacks in ((), (ChunkedLoss(8),))
    ]
    assert peaks[1] < peaks[0] / 2
