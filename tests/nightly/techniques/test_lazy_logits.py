"""Whatever is done to lazy logits gives what it gives with the logits themselves, in float64."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memfit.techniques.lazy_logits import HeadCall, LazyLogits

BATCH, LENGTH, WIDTH, CLASSES = 3, 6, 8, 11
LABELS = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS[0, 2:4] = -100
VECTOR = torch.linspace(-1, 1, CLASSES, dtype=torch.float64)


class Program(nn.Module):
    """A head, and other parameters for what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Parameter(torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64))
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(CLASSES, dtype=torch.float64))
        self.per_token = nn.Parameter(torch.rand(BATCH, LENGTH, 1, dtype=torch.float64))
        self.chunked = 0
        self.read: list[str] = []

    def logits(self, lazy: bool) -> Tensor:
        if not lazy:
            return self.head(self.hidden)

        def on_loss(call: HeadCall, difference: object) -> None:
            self.chunked += 1
            assert not difference()

        parameters = list(self.head.parameters())
        on_whole = lambda call, name: self.read.append(name)  # noqa: E731
        weights = self.head.weight, self.head.bias
        return HeadCall(self.head.forward, self.hidden, self.head, weights, parameters, 4, on_whole, on_loss).lazy()


def flat(logits, labels=LABELS, **options):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


def shifted(logits, **options):
    return flat(logits[..., :-1, :].contiguous(), LABELS[:, 1:], **options)


def log_likelihood(logits):
    return F.nll_loss(F.log_softmax(logits.float(), dim=-1, dtype=torch.float64).view(-1, CLASSES), LABELS.view(-1))


def masked(logits):
    mask = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(4)) > 0.4
    return F.cross_entropy(logits[mask], LABELS[mask])


def weighted(losses):
    return (losses * PER_TOKEN).sum(dim=1).sigmoid().sum()


def every_masked(logits):
    mask = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(4)) > 0.4
    losses = F.cross_entropy(logits[mask], LABELS[mask], reduction="none", label_smoothing=0.1)
    return losses @ torch.arange(1.0, 1.0 + len(losses), dtype=losses.dtype)


PER_TOKEN = torch.linspace(0.5, 2, LENGTH, dtype=torch.float64)
CHUNKED = {
    "flat": lambda p, x: flat(x),
    "shifted": lambda p, x: shifted(x),
    "sum": lambda p, x: shifted(x, reduction="sum"),
    "smoothed": lambda p, x: shifted(x, label_smoothing=0.2),
    "other ignored index": lambda p, x: flat(x, LABELS.clamp(min=0), ignore_index=3),
    "classes second": lambda p, x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "permuted": lambda p, x: F.cross_entropy(x.permute(0, 2, 1), LABELS),
    "sequence first": lambda p, x: flat(x.transpose(0, 1), LABELS.t()),
    "one sample": lambda p, x: F.cross_entropy(x[1], LABELS[1]),
    "last token": lambda p, x: F.cross_entropy(x[:, -1], LABELS[:, -1]),
    "one token": lambda p, x: F.cross_entropy(x[1, 1], LABELS[1, 1]),
    "every second": lambda p, x: flat(x[:, ::2], LABELS[:, ::2]),
    "masked": lambda p, x: masked(x),
    "unsqueezed": lambda p, x: flat(x.unsqueeze(1).squeeze(1)[None]),
    "soft-capped": lambda p, x: shifted(torch.tanh(x / 3.0) * 3.0),
    "scaled by a parameter": lambda p, x: flat(x * p.scale.exp()),
    "bias of the classes": lambda p, x: flat(x + p.shift),
    "bias of rank 3": lambda p, x: flat(x + p.shift[None, None]),
    "bias after a transpose": lambda p, x: F.cross_entropy(x.transpose(1, 2) + p.shift[:, None], LABELS),
    "classes masked": lambda p, x: flat(x.masked_fill(VECTOR > 0.8, -30.0)),
    "classes sliced": lambda p, x: flat(x[..., 1:9] + p.shift[1:9], LABELS % 8),
    "clamped": lambda p, x: flat(x.clamp(-0.5, 0.5)),
    "log-softmax": lambda p, x: flat(x.log_softmax(-1) * 0.5),
    "log-likelihood": lambda p, x: log_likelihood(x),
    "two losses": lambda p, x: flat(x) + shifted(x * 0.5),
    "partly detached": lambda p, x: flat((x * p.scale).detach()) + flat(x),
    "read without gradients": lambda p, x: flat(x) + (x.detach().argmax(-1) == LABELS).sum(),
    "read for another loss": lambda p, x: flat(x) + x.logsumexp(-1).pow(2).mean(),
    "double": lambda p, x: flat(x.double()),
    "float": lambda p, x: flat(x.float()),
    "every token": lambda p, x: flat(x, reduction="none").pow(2).mean(),
    "every token weighted": lambda p, x: (shifted(x * p.scale, reduction="none") * PER_TOKEN[1:].repeat(BATCH)).sum(),
    "every token of each sample": lambda p, x: weighted(F.cross_entropy(x.transpose(1, 2), LABELS, reduction="none")),
    "every masked token": lambda p, x: every_masked(x),
}
WHOLE = {
    "class weights": lambda p, x: flat(x, weight=VECTOR.exp()),
    "soft targets": lambda p, x: F.cross_entropy(x[0], F.one_hot(LABELS.clamp(min=0), CLASSES).double()[0]),
    "token weights": lambda p, x: flat(x * p.per_token),
    "detached, then scaled": lambda p, x: flat(x.detach() * p.scale),
    "not a log-softmax": lambda p, x: F.nll_loss(x.reshape(-1, CLASSES), LABELS.reshape(-1)),
    "tokens repeated": lambda p, x: flat(x[:, [1, 1, 2]], LABELS[:, :3]),
    "tokens expanded": lambda p, x: flat(x[0].expand(BATCH, LENGTH, CLASSES)),
    "joined": lambda p, x: flat(torch.cat([x, x * 2]), LABELS.repeat(2, 1)),
    "changed in place": lambda p, x: changed(x),
}


def changed(logits):
    copied, view = logits.clone(), logits[:, :3]
    logits[..., 2] = -4.0
    view.mul_(2)
    return flat(logits) + 2 * flat(copied) + view.mean()


def gradients(program, run, lazy):
    loss = run(program, program.logits(lazy))
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad for p in program.parameters())]


@pytest.mark.parametrize("name", [*CHUNKED, *WHOLE])
def test_loss_and_gradients_are_those_of_the_logits(name):
    run = {**CHUNKED, **WHOLE}[name]
    plain, program = Program(), Program()
    tolerance = 1e-6 if name in ("float", "log-likelihood") else 1e-12
    for ours, theirs in zip(gradients(program, run, True), gradients(plain, run, False), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert bool(program.chunked) == (name in CHUNKED)
    assert bool(program.read) == (name in WHOLE or name.startswith("read"))


@pytest.mark.parametrize("name", list(CHUNKED))
def test_nothing_stays_when_the_loss_is_gone(name):
    program = Program()
    kept = weakref.ref(logits := program.logits(lazy=True))
    call, loss = weakref.ref(logits.call), CHUNKED[name](program, logits)
    loss.backward()
    del logits, loss
    gc.collect()
    assert kept() is None
    assert call() is None


def test_what_is_detached_shares_the_logits():
    program = Program()
    logits = program.logits(lazy=True).tanh()
    detached = logits.detach()
    assert not detached.whole().requires_grad
    assert logits.whole().requires_grad
    assert detached.whole().data_ptr() == logits.whole().data_ptr()


def test_values_are_those_of_the_logits():
    program = Program()
    expected, lazy = program.logits(False), program.logits(True)
    assert isinstance(lazy, LazyLogits)
    assert (lazy.shape, lazy.dtype, lazy.device) == (expected.shape, expected.dtype, expected.device)
    assert not program.read
    assert torch.equal(lazy, expected)
    for read in (Tensor.tolist, Tensor.numpy, copy.deepcopy, repr, Tensor.sum, lambda x: torch.stack([x, x])):
        values = [read(x.detach()) for x in (program.logits(True), expected)]
        assert str(values[0]) == str(values[1])
    assert torch.equal(torch.zeros(2) + program.logits(True)[0, 0, :2], expected[0, 0, :2])


def test_logits_of_other_weights_are_refused():
    program = Program()
    lazy = program.logits(True)
    with torch.no_grad():
        program.head.weight.mul_(2)
    for read in (Tensor.sum, lambda x: flat(x)):
        with pytest.raises(RuntimeError, match="changed or freed"):
            read(lazy)


@pytest.mark.parametrize("use", [lambda x: x.register_hook(print), lambda x: x.retain_grad()])
def test_gradients_of_logits_are_refused(use):
    with pytest.raises(ValueError, match="gradient of logits"):
        use(Program().logits(True))


def test_no_token_counts():
    program = Program()
    nothing = torch.full_like(LABELS, -100)
    for run in (lambda p, x: flat(x, nothing), lambda p, x: flat(torch.tanh(x) * p.scale, nothing)):
        loss, *rest = gradients(program, run, True)
        assert loss == 0
        assert all(gradient is None or not gradient.any() for gradient in rest)
