"""The zoo: functions that make a small LightningModule and a batch, by name."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH, CLASSES, VOCABULARY = 64, 256, 10, 97

Made = tuple[pl.LightningModule, Any]


@dataclass(frozen=True)
class Entry:
    """A module of the zoo."""

    make: Callable[[], Made]
    precision: Any = "32-true"


class Simple(pl.LightningModule):
    """A network, a loss of network and batch, and an optimizer."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Tensor], adam: bool = False) -> None:
        super().__init__()
        self.net, self.loss, self.adam = net, loss, adam

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Scale(nn.Module):
    """A weight and a bias per column: next to no memory but that of the operator after it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight + self.bias).sigmoid()


def numbers(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def places(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0))


def on_rows(function: Callable[[Tensor], Tensor], *shape: int) -> Callable[[], Made]:
    """A module whose loss is the mean of a function of `ROWS` rows, which may be seen in another shape."""

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        rows = net(batch)
        return function(rows.view(shape) if shape else rows).mean()

    return lambda: (Simple(Scale(), loss), numbers(ROWS, WIDTH))


def of_pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Made]:
    """A module whose loss compares rows with targets in [0, 1)."""
    return lambda: (
        Simple(Scale(), lambda net, b: function(net(b[0]), b[1])),
        (numbers(ROWS, WIDTH), numbers(ROWS, WIDTH)),
    )


def of_classes(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Made]:
    """A module whose loss compares rows with the number of a column."""
    return lambda: (
        Simple(Scale(), lambda net, b: function(net(b[0]), b[1])),
        (numbers(ROWS, WIDTH), places(WIDTH, ROWS)),
    )


def network(make: Callable[[], nn.Module], *shape: int, adam: bool = False) -> Callable[[], Made]:
    """A network whose output's square is the loss, on numbers of a shape."""
    return lambda: (Simple(make(), _square, adam), numbers(*shape))


def _square(net: nn.Module, batch: Any) -> Tensor:
    output = net(batch)
    return (output[0] if isinstance(output, tuple) else output).float().pow(2).mean()


# --- losses -----------------------------------------------------------------------------------------------------------


LOSSES: dict[str, Callable[[], Made]] = {
    "MSELoss": of_pair(nn.MSELoss()),
    "MSELoss sum": of_pair(nn.MSELoss(reduction="sum")),
    "L1Loss": of_pair(nn.L1Loss()),
    "SmoothL1Loss": of_pair(nn.SmoothL1Loss()),
    "HuberLoss": of_pair(nn.HuberLoss()),
    "BCELoss": of_pair(nn.BCELoss()),
    "BCEWithLogitsLoss": of_pair(nn.BCEWithLogitsLoss()),
    "BCEWithLogitsLoss pos_weight": of_pair(nn.BCEWithLogitsLoss(pos_weight=torch.full((WIDTH,), 2.0))),
    "KLDivLoss": of_pair(nn.KLDivLoss(reduction="batchmean")),
    "PoissonNLLLoss": of_pair(nn.PoissonNLLLoss()),
    "GaussianNLLLoss": of_pair(lambda a, b: F.gaussian_nll_loss(a, b, a.exp())),
    "SoftMarginLoss": of_pair(lambda a, b: F.soft_margin_loss(a, b.sign())),
    "HingeEmbeddingLoss": of_pair(lambda a, b: F.hinge_embedding_loss(a, b.sign())),
    "CosineEmbeddingLoss": of_pair(lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(ROWS))),
    "MarginRankingLoss": of_pair(lambda a, b: F.margin_ranking_loss(a, b, b.sign())),
    "TripletMarginLoss": of_pair(lambda a, b: F.triplet_margin_loss(a, b, b.flip(0))),
    "MultiLabelSoftMarginLoss": of_pair(lambda a, b: F.multilabel_soft_margin_loss(a, b.round())),
    "MultiLabelMarginLoss": of_pair(lambda a, b: F.multilabel_margin_loss(a, torch.zeros_like(b, dtype=torch.int64))),
    "CrossEntropyLoss": of_classes(nn.CrossEntropyLoss()),
    "CrossEntropyLoss smoothed": of_classes(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "CrossEntropyLoss of images": lambda: (
        Simple(nn.Conv2d(3, CLASSES, 1), lambda net, b: F.cross_entropy(net(b[0]), b[1])),
        (numbers(2, 3, 32, 32), places(CLASSES, 2, 32, 32)),
    ),
    "NLLLoss": of_classes(lambda a, b: F.nll_loss(a.log(), b)),
    "MultiMarginLoss": of_classes(nn.MultiMarginLoss()),
    "CTCLoss": of_pair(
        lambda a, b: F.ctc_loss(
            a.view(16, 32, 32).log_softmax(-1), torch.ones(32, 5, dtype=torch.int64), (16,) * 32, (5,) * 32
        )
    ),
    "Softmax of probabilities": of_pair(lambda a, b: F.cross_entropy(a, b.softmax(1))),
}  # fmt: skip


# --- operators --------------------------------------------------------------------------------------------------------


OPERATORS: dict[str, Callable[[], Made]] = {
    "cdist": on_rows(lambda a: torch.cdist(a, a.flip(0))),
    "pdist": on_rows(F.pdist),
    "topk": on_rows(lambda a: a.topk(50, 1)[0]),
    "median": on_rows(lambda a: a.median(1)[0]),
    "quantile": on_rows(lambda a: a.quantile(0.3, 1)),
    "sort": on_rows(lambda a: a.sort(1)[0].pow(2)),
    "cumprod": on_rows(lambda a: a.cumprod(1)),
    "prod": on_rows(lambda a: a.prod(1)),
    "logcumsumexp": on_rows(lambda a: a.logcumsumexp(1)),
    "cumsum": on_rows(lambda a: a.cumsum(1).pow(2)),
    "std and norm": on_rows(lambda a: a.std(1) * a.norm(dim=1)),
    "scatter_add": on_rows(lambda a: torch.zeros(ROWS, WIDTH).scatter_add(1, places(WIDTH, ROWS, WIDTH), a).pow(2)),
    "scatter_reduce": on_rows(
        lambda a: torch.zeros(ROWS, WIDTH).scatter_reduce(1, places(WIDTH, ROWS, WIDTH), a, "amax").pow(2)
    ),
    "gather": on_rows(lambda a: a.gather(1, places(WIDTH, ROWS, 50)).pow(2)),
    "index": on_rows(lambda a: a[places(ROWS, 200)].pow(2)),
    "index_put": on_rows(lambda a: torch.zeros(ROWS, WIDTH).index_put((places(ROWS, ROWS),), a, True).pow(2)),
    "index_add": on_rows(lambda a: torch.zeros(9, WIDTH).index_add(0, places(9, ROWS), a).pow(2)),
    "rfft": on_rows(lambda a: torch.fft.rfft(a).abs()),
    "fft2": on_rows(lambda a: torch.fft.fft2(a).abs()),
    "stft": on_rows(lambda a: torch.stft(a, 64, 16, window=torch.hann_window(64), return_complex=True).abs()),
    "inverse": on_rows(lambda a: torch.linalg.inv(a @ a.T + ROWS * torch.eye(ROWS))),
    "cholesky": on_rows(lambda a: torch.linalg.cholesky(a @ a.T + ROWS * torch.eye(ROWS))),
    "svd": on_rows(lambda a: torch.linalg.svdvals(a)),
    "solve": on_rows(lambda a: torch.linalg.solve(a[:, :ROWS] + ROWS * torch.eye(ROWS), a)),
    "bilinear upsampling": on_rows(lambda a: F.interpolate(a, scale_factor=2, mode="bilinear").pow(2), 4, 16, 16, 16),
    "bicubic upsampling": on_rows(lambda a: F.interpolate(a, scale_factor=2, mode="bicubic").pow(2), 4, 16, 16, 16),
    "nearest upsampling": on_rows(lambda a: F.interpolate(a, scale_factor=2).pow(2), 4, 16, 16, 16),
    "grid_sample": on_rows(
        lambda a: F.grid_sample(a, torch.zeros(4, 24, 24, 2), align_corners=False).pow(2), 4, 16, 16, 16
    ),
    "unfold and fold": on_rows(lambda a: F.fold(F.unfold(a, 3, padding=1), 16, 3, padding=1).pow(2), 4, 16, 16, 16),
    "max_pool": on_rows(lambda a: F.max_pool2d(a, 2).pow(2), 4, 16, 16, 16),
    "adaptive pooling": on_rows(lambda a: F.adaptive_avg_pool2d(a, 5).pow(2), 4, 16, 16, 16),
    "pixel shuffle": on_rows(lambda a: F.pixel_shuffle(a, 2).pow(2), 4, 16, 16, 16),
    "reflection padding": on_rows(lambda a: F.pad(a, (2, 2, 2, 2), mode="reflect").pow(2), 4, 16, 16, 16),
    "dropout": on_rows(lambda a: F.dropout(a, 0.2)),
    "einsum": on_rows(lambda a: torch.einsum("bhtd,bhsd->bhts", a, a), 4, 4, 16, 64),
    "complex": on_rows(lambda a: (torch.complex(a, a) @ torch.complex(a, a).mT.conj()).abs()),
    "mixed types": on_rows(lambda a: a * places(3, ROWS, WIDTH) + a.double()),
}


# --- layers -----------------------------------------------------------------------------------------------------------


def _attention(**options: Any) -> Callable[[], Made]:
    def attend(a: Tensor) -> Tensor:
        mask = torch.zeros(16, 16) if options.get("masked") else None
        return F.scaled_dot_product_attention(a, a, a, mask, is_causal=bool(options.get("causal")))

    return on_rows(attend, 4, 4, 16, 64)


def _channels_last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]  # type: ignore[no-any-return]


def _convolution(kind: Any, *arguments: Any, sides: int = 2, **options: Any) -> Callable[[], Made]:
    shape = {1: (8, 16, 64), 2: (4, 16, 24, 24), 3: (2, 16, 8, 12, 12)}[sides]
    return network(lambda: nn.Sequential(kind(16, 32, *arguments, **options), nn.ReLU()), *shape)


LAYERS: dict[str, Callable[[], Made]] = {
    "Conv1d": _convolution(nn.Conv1d, 3, sides=1, padding=1),
    "Conv2d": _convolution(nn.Conv2d, 3, padding=1),
    "Conv2d strided": _convolution(nn.Conv2d, 3, stride=2),
    "Conv2d 1x1": _convolution(nn.Conv2d, 1),
    "Conv2d 1x1 strided": _convolution(nn.Conv2d, 1, stride=2),
    "Conv2d dilated": _convolution(nn.Conv2d, 3, dilation=2),
    "Conv2d grouped": _convolution(nn.Conv2d, 3, groups=4),
    "Conv2d depthwise": _convolution(nn.Conv2d, 7, groups=16, padding=3),
    "Conv2d reflecting": _convolution(nn.Conv2d, 3, padding=1, padding_mode="reflect"),
    "Conv3d": _convolution(nn.Conv3d, 3, sides=3, padding=1),
    "ConvTranspose1d": _convolution(nn.ConvTranspose1d, 4, sides=1, stride=2),
    "ConvTranspose2d": _convolution(nn.ConvTranspose2d, 4, stride=2, padding=1),
    "ConvTranspose3d": _convolution(nn.ConvTranspose3d, 2, sides=3, stride=2),
    "Conv2d channels last": lambda: (
        Simple(_channels_last(nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU())), _square),
        numbers(4, 16, 24, 24).to(memory_format=torch.channels_last),
    ),
    "BatchNorm2d": network(lambda: nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()), 4, 16, 24, 24),
    "GroupNorm": network(lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU()), 4, 16, 24, 24),
    "InstanceNorm2d": network(lambda: nn.Sequential(nn.InstanceNorm2d(16, affine=True), nn.GELU()), 4, 16, 24, 24),
    "LayerNorm": network(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU()), ROWS, WIDTH),
    "RMSNorm": network(lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.GELU()), ROWS, WIDTH),
    "PReLU": network(lambda: nn.PReLU(WIDTH), ROWS, WIDTH),
    "Bilinear": lambda: (
        Simple(nn.Bilinear(32, 32, 16), lambda net, b: net(b, b).pow(2).mean()), numbers(ROWS, 32)
    ),
    "Linear with AdamW": network(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), ROWS, WIDTH, adam=True),
    "attention": _attention(),
    "attention, causal": _attention(causal=True),
    "attention, masked": _attention(masked=True),
    "MultiheadAttention": network(MultiHead, 8, 24, 64),
    "TransformerEncoderLayer": network(
        lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True), 8, 24, 64
    ),
    "LSTM": network(lambda: nn.LSTM(32, 48, num_layers=2, batch_first=True), 8, 20, 32),
    "LSTM, both ways": network(lambda: nn.LSTM(32, 48, bidirectional=True), 20, 8, 32),
    "GRU": network(lambda: nn.GRU(32, 48, batch_first=True), 8, 20, 32),
    "RNN": network(lambda: nn.RNN(32, 48, batch_first=True), 8, 20, 32),
    "LSTMCell": lambda: (Simple(nn.LSTMCell(WIDTH, 64), lambda net, b: net(b)[0].pow(2).mean()), numbers(ROWS, WIDTH)),
    "Embedding": lambda: (Simple(nn.Embedding(500, 64), _square), places(500, 16, 24)),
    "Embedding sparse": lambda: (Simple(nn.Embedding(500, 64, sparse=True), _square), places(500, 16, 24)),
    "EmbeddingBag": lambda: (Simple(nn.EmbeddingBag(500, 64), _square), places(500, 16, 24)),
    "weight_norm": network(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 64)), ROWS, WIDTH),
    "spectral_norm": network(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 64)), ROWS, WIDTH),
}  # fmt: skip


# --- ways to train ----------------------------------------------------------------------------------------------------


class Gan(pl.LightningModule):
    """Two optimizers in turns, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_maker, of_judge = self.optimizers()  # type: ignore[attr-defined]
        fake = self.make(torch.randn(batch.size(0), 32))
        real, made = self.judge(batch), self.judge(fake.detach())
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        loss = loss + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))
        of_judge.zero_grad()
        self.manual_backward(loss)
        of_judge.step()
        judged = self.judge(fake)
        of_maker.zero_grad()
        self.manual_backward(F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))
        of_maker.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.make, self.judge)]


class Averaged(Simple):
    """A teacher that is the average of its pupil."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 64))
        super().__init__(net, F.mse_loss)
        self.teacher = copy.deepcopy(net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch), self.teacher(batch))

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.01)


class Bank(Simple):
    """Contrast against features of earlier batches."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 64), self._contrast)
        self.register_buffer("bank", torch.randn(256, 64))

    def _contrast(self, net: nn.Module, batch: Tensor) -> Tensor:
        features = F.normalize(net(batch))
        loss = F.cross_entropy(features @ self.bank.clone().T / 0.1, torch.zeros(ROWS, dtype=torch.int64))
        self.bank = torch.cat((features.detach(), self.bank))[:256]
        return loss


class Cubed(torch.autograd.Function):
    """A function with a backward of its own, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Penalty(Simple):
    """Gradients of gradients."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 128), nn.Softplus(), nn.Linear(128, 1)), self._loss)

    def _loss(self, net: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.requires_grad_()
        (gradient,) = torch.autograd.grad(net(batch).sum(), batch, create_graph=True)
        return (gradient.norm(dim=1) - 1).pow(2).mean()


class StateSpace(nn.Module):
    """A selective scan, step by step."""

    def __init__(self, width: int = 32, states: int = 8) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(width, states))
        self.project, self.gate = nn.Linear(width, 2 * states), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        enter, leave = self.project(x).chunk(2, -1)
        steps, state, outputs = F.softplus(self.gate(x)), torch.zeros(x.size(0), *self.decay.shape), []
        for at in range(x.size(1)):
            decay = torch.exp(-steps[:, at, :, None] * self.decay)
            state = decay * state + x[:, at, :, None] * enter[:, at, None]
            outputs.append((state * leave[:, at, None]).sum(-1))
        return torch.stack(outputs, 1)


class UNet(nn.Module):
    """A small diffusion network: steps, skips, attention in the middle."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(16, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm, self.qkv = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, 6 * width, 1)
        self.mid = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 3, 3, padding=1))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        angles = at[:, None] * torch.exp(torch.arange(8) * -math.log(1000) / 8)
        step = self.steps(torch.cat((angles.sin(), angles.cos()), 1))[:, :, None, None]
        skip = self.enter(x)
        h = self.down(skip) + step
        q, k, v = (part.flatten(2).mT[:, None] for part in self.qkv(self.norm(h)).chunk(3, 1))
        h = h + F.scaled_dot_product_attention(q, k, v)[:, 0].mT.reshape(h.shape)
        h = h + self.mid(h)
        return self.leave(torch.cat((self.up(h), skip), 1))  # type: ignore[no-any-return]


def _diffusion() -> Made:
    def loss(net: nn.Module, images: Tensor) -> Tensor:
        noise, at = torch.randn_like(images), torch.rand(images.size(0))
        return F.mse_loss(net(images + at[:, None, None, None] * noise, at), noise)

    return Simple(UNet(), loss, adam=True), numbers(4, 3, 32, 32)


WAYS: dict[str, Callable[[], Made]] = {
    "GAN": lambda: (Gan(), numbers(ROWS, WIDTH)),
    "average of weights": lambda: (Averaged(), numbers(ROWS, WIDTH)),
    "memory bank": lambda: (Bank(), numbers(ROWS, WIDTH)),
    "autograd.Function": on_rows(lambda a: Cubed.apply(a)),  # type: ignore[no-untyped-call]
    "checkpointed blocks": network(Checkpointed, ROWS, 64),
    "gradient penalty": lambda: (Penalty(), numbers(ROWS, WIDTH)),
    "state space": network(StateSpace, 4, 24, 32),
    "diffusion U-Net": _diffusion,
    "residual CNN": network(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
        ), 8, 3, 48, 48, adam=True,
    ),
    "autoencoder": network(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.ELU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ELU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(16, 3, 4, 2, 1),
        ), 4, 3, 32, 32,
    ),
}  # fmt: skip


# --- families of transformers -----------------------------------------------------------------------------------------


def _language(name: str) -> Callable[[], Made]:
    def make() -> Made:
        from benchmarks.techniques_sweep import tiny

        model, batch = tiny.build(name)
        return Simple(model, lambda net, b: net(**b).loss, adam=True), batch

    return make


def _family(kind: str, head: str, batch: Callable[[], dict[str, Tensor]], **sizes: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes)
        net = getattr(transformers, f"{kind}{head}")(config).train()
        return Simple(net, _own_loss, adam=True), batch()

    return make


def _own_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = net(**batch)
    loss = getattr(output, "loss", None)
    found: Tensor = loss if loss is not None else output[0].pow(2).mean()
    return found


_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64, "max_position_embeddings": 32}  # fmt: skip
_IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
          "image_size": 32, "patch_size": 8}  # fmt: skip
_STAGES = {"image_size": 32, "patch_size": 2, "depths": [1, 1], "embed_dim": 16, "num_heads": [2, 4], "window_size": 4}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": numbers(4, 3, 32, 32), "labels": places(2, 4)}


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": places(VOCABULARY, 4, 16), "labels": places(VOCABULARY, 4, 16)}


def _pairs() -> dict[str, Tensor]:
    return {"input_ids": places(VOCABULARY, 4, 16), "pixel_values": numbers(4, 3, 32, 32)}


FAMILIES: dict[str, Callable[[], Made]] = {
    **{name: _language(name) for name in (
        "gpt2", "llama", "mixtral", "mamba", "t5", "bart", "gpt_neox", "bloom", "falcon", "qwen2", "gemma2", "phi",
        "opt", "mistral", "olmo",
    )},
    "BERT": _family("Bert", "ForMaskedLM", _tokens, **_TEXT),
    "RoBERTa": _family("Roberta", "ForMaskedLM", _tokens, **{**_TEXT, "max_position_embeddings": 40}),
    "DeBERTa-v2": _family("DebertaV2", "ForMaskedLM", _tokens, **_TEXT),
    "ViT": _family("ViT", "ForImageClassification", _images, **_IMAGE),
    "DeiT": _family("DeiT", "ForImageClassification", _images, **_IMAGE),
    "Swin": _family("Swin", "ForImageClassification", _images, **_STAGES),
    "ConvNeXt": _family(
        "ConvNext", "ForImageClassification", _images, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2
    ),
    "ResNet": _family(
        "ResNet", "ForImageClassification", _images, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
        layer_type="basic",
    ),
    "SegFormer": _family(
        "Segformer", "ForSemanticSegmentation",
        lambda: {"pixel_values": numbers(2, 3, 32, 32), "labels": places(2, 2, 32, 32)},
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
    ),
    "wav2vec2": _family(
        "Wav2Vec2", "ForCTC", lambda: {"input_values": numbers(2, 3200), "labels": places(30, 2, 4) + 1},
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=[16] * 3, conv_stride=[5, 2, 2], conv_kernel=[10, 3, 3], num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0,
    ),
    "Whisper": _family(
        "Whisper", "ForConditionalGeneration",
        lambda: {"input_features": numbers(2, 16, 64), "labels": places(VOCABULARY, 2, 12)},
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=32, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "CLIP": _family(
        "CLIP", "Model", lambda: {**_pairs(), "return_loss": True}, projection_dim=16,
        text_config={**_TEXT, "eos_token_id": 2}, vision_config=_IMAGE,
    ),
}  # fmt: skip


HALF = ("MSELoss", "CrossEntropyLoss", "Conv2d", "Conv2d 1x1", "LayerNorm", "attention, causal", "gpt2", "mixtral",
        "ViT", "diffusion U-Net", "TransformerEncoderLayer", "BERT", "LSTM", "Linear with AdamW")  # fmt: skip
"""Those that also train in bf16-mixed."""

_FLOAT = {**LOSSES, **OPERATORS, **LAYERS, **WAYS, **FAMILIES}

ZOO: dict[str, Entry] = {
    **{name: Entry(make) for name, make in _FLOAT.items()},
    **{f"{name} (bf16-mixed)": Entry(_FLOAT[name], "bf16-mixed") for name in HALF},
}
"""Every module by name."""
