"""Modules of the kinds in which published projects, or reports of their users, showed a fault; written anew here.

Most are not met yet. `NOT_TRIED` has what a process on one CPU can't try.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemFit, MemoryLimit, MemoryMonitor, MemoryPrediction, MicroBatching
from lightning_memfit.data import ChatData
from tests.helpers.trainers import quiet_trainer
from tests.zoo.compare import is_refusal
from tests.zoo.trial import Trial, outcome

FEATURES = 8


class Base(pl.LightningModule):
    """A layer, plain SGD and 96 samples; what follows changes one thing about it."""

    batch_size = 16
    num_samples = 96

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make_net()

    def make_net(self) -> nn.Module:
        return nn.Linear(FEATURES, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(2)
        data = torch.randn(self.num_samples, FEATURES, generator=generator)
        return DataLoader(TensorDataset(data), self.batch_size)


def collate_words(items: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    words, targets = zip(*items, strict=True)
    return {
        "x": pad_sequence(words, batch_first=True),
        "length": torch.tensor([len(one) for one in words]),
        "y": torch.stack(targets),
    }


class Packed(Base):
    """A recurrent net on packed sequences; its mask is as long as the longest sequence of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        lengths = batch["length"]
        packed = pack_padded_sequence(batch["x"], lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        mask = torch.arange(batch["x"].shape[1])[None] < lengths[:, None]
        pooled = (out * mask[..., None]).sum(1) / lengths[:, None]
        return F.mse_loss(self.head(pooled).squeeze(-1), batch["y"])

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        lengths = [6] * 10 + [3, 4, 2, 3, 3, 2]
        rows = [(torch.randn(n, 4, generator=generator), torch.randn((), generator=generator)) for n in lengths]
        return DataLoader(rows, 8, collate_fn=collate_words)


class Contrastive(Base):
    """Batch norm and a contrastive loss."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = F.normalize(self.net(batch[0])), F.normalize(self.net(batch[0] + 0.1))
        return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def collate_graphs(items: list[int]) -> dict[str, Tensor]:
    sizes = torch.tensor([3 + item % 3 for item in items])
    generator = torch.Generator().manual_seed(items[0])
    return {
        "x": torch.randn(int(sizes.sum()), FEATURES, generator=generator),
        "graph": torch.repeat_interleave(torch.arange(len(items)), sizes),
        "y": torch.randn(len(items), generator=generator),
    }


class Graphs(Base):
    """Nodes of all graphs in one tensor, and the graph of each node."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes = torch.relu(self.net(batch["x"]))
        sums = nodes.new_zeros(len(batch["y"]), 64).index_add(0, batch["graph"], nodes)
        return F.mse_loss(sums.mean(1), batch["y"])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(64), 16, collate_fn=collate_graphs)


class Plateau(Base):
    """The learning rate follows the validation's loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    val_dataloader = Base.train_dataloader


class Normalised(Base):
    """Batch norm of vectors: one sample alone raises."""

    batch_size, num_samples = 256, 768

    def make_net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1)
        )


class Episodes(Base):
    """The first half of a batch supports the classes of its second half."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (support, queries), (classes, wanted) = self.net(batch[0]).chunk(2), batch[1].chunk(2)
        known = classes.unique()
        centres = torch.stack([support[classes == one].mean(0) for one in known])
        scores = -(queries[:, None] - centres[None]).square().sum(-1)
        return F.cross_entropy(scores, (known[None] == wanted[:, None]).long().argmax(-1))

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(2)
        classes = torch.arange(4).repeat(24)
        return DataLoader(TensorDataset(torch.randn(96, FEATURES, generator=generator), classes), 16)


class Drawing:
    """Draws problems; its copy takes over the global generator."""

    def __init__(self) -> None:
        self.generator = torch.manual_seed(0)

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.generator = torch.manual_seed(0)
        self.generator.set_state(state["state"])


class DataOfSetup(Base):
    """Makes its data in its own `setup`."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.randn(96, FEATURES, generator=torch.Generator().manual_seed(2)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, 16)


class Environment(DataOfSetup):
    """Holds what seeds the global generator when it is copied, and drops values."""

    def make_net(self) -> nn.Module:
        self.drawing = Drawing()
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 1))


class HeldData(Base):
    """Keeps a data set that never goes to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.data = TensorDataset(torch.randn(20_000, FEATURES))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, 16)


class HeldBySetup(HeldData):
    """The same, made in `setup`."""

    def __init__(self) -> None:
        super().__init__()
        del self.data

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.randn(20_000, FEATURES))


class MaskedWeights(Base):
    """Masks its weights in every step: the same whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(64, FEATURES) > 0.5).float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.weight.data *= self.mask
        return super().training_step(batch, batch_idx)


class Image(Tensor):
    """Carries a name only; operations give plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(Image) if func in (Tensor.clone, Tensor.to, Tensor.detach) else out


class Images(Base):
    """Makes a tensor subclass of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0].as_subclass(Image)).square().mean()


class TopK(torch.autograd.Function):
    """The largest values of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        values, index = x.topk(k, -1)
        ctx.save_for_backward(index)
        ctx.shape, ctx.note = x.shape, x * 2
        return torch.zeros_like(x).scatter(-1, index, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=gradient.dtype).scatter(-1, index, gradient.gather(-1, index)), None


class PeakOfOptimizer(pl.LightningModule):
    """The optimizer step is the peak, so that every size up to 48 needs the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(96, 768, bias=False), nn.Linear(768, 96, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.leave(TopK.apply(self.enter(batch), 24)), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(192, 96), 48)


class KeptOutputs(pl.LightningModule):
    """Keeps what its validation gave, and joins it at the end: 16 MiB, and as much again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4096))
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(self.net(batch[0]))

    def on_validation_epoch_end(self) -> None:
        torch.cat(self.kept)
        self.kept.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(1024, 64)), 32)

    val_dataloader = train_dataloader


class Deep(Base):
    """Eight layers, and a batch of 4,096."""

    batch_size, num_samples = 4096, 4096

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))


# --- how they are tried -----------------------------------------------------------------------------------------------

Callbacks = Callable[[], list[pl.Callback]]


def train(make: Callable[[], Any], *callbacks: pl.Callback, steps: int = 13) -> Any:
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(1)
    trainer = quiet_trainer(*callbacks, max_steps=steps, num_sanity_val_steps=0)
    try:
        trainer.fit(module)
    except Exception as error:
        if trainer.global_step and is_refusal(error):
            raise RuntimeError("A refusal came after a step.") from error
        raise
    return module


def against_plain(make: Callable[[], Any], callbacks: Callbacks) -> str:
    """Whether weights are those of plain training."""
    plain, ours = train(make), []
    ended = outcome(lambda: ours.append(train(make, *callbacks())), "exact")
    if ended != "exact":
        return ended
    pairs = zip(plain.parameters(), ours[0].parameters(), strict=True)
    return "exact" if all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs) else "WRONG"


def accepted(make: Callable[[], Any], callbacks: Callbacks) -> str:
    """Whether training goes on, with other numbers, as was asked for."""
    return outcome(lambda: train(make, *callbacks()), "accepted")


def older_lightning() -> str:
    """Modules that import `pytorch_lightning`, with its Trainer."""
    if importlib.util.find_spec("pytorch_lightning") is None:
        return "skipped; pytorch_lightning is not installed"
    import pytorch_lightning

    class Older(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(FEATURES, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self) -> DataLoader:
            return DataLoader(torch.ones(32, FEATURES), 8)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)

    def act() -> None:
        callback = MicroBatching(micro_batch_size=4)
        pytorch_lightning.Trainer(accelerator="cpu", max_steps=2, callbacks=[callback], **quiet).fit(Older())

    return outcome(act, "exact")


def predicted(make: Callable[[], Any], *others: pl.Callback) -> str:
    """Whether the predicted peak is the measured one, by two percent."""
    monitor = MemoryMonitor()
    ended = outcome(lambda: train(make, *others, MemoryPrediction(), monitor, steps=8), "peak")
    if ended != "peak":
        return ended
    report: Any = monitor.report
    if report.predicted is None:
        return "no prediction"
    wanted, found = (sum(one.entries.values()) for one in (report.measured, report.predicted))
    off = found / wanted - 1
    return "peak" if abs(off) < 0.02 else f"other peak; {100 * off:+.0f} %"


def sizes_found() -> str:
    """Sizes found under limits at the peak and a little above it, which is the same for all sizes."""

    def run(limit: int, **size: int) -> Any:
        limited, batching = MemoryLimit(limit), MicroBatching(**size, allow_batch_statistics=True)
        train(PeakOfOptimizer, batching, limited, steps=8)
        return limited.ledger.peak_bytes if size else batching.found.tried

    most = max(run(1 << 40, micro_batch_size=size) for size in (1, 48))
    found = [run(int(most * share)) for share in (1.0, 1.005, 1.02, 1.1)]
    return "largest size" if set(found) == {48} else "smaller sizes"


def kept_beyond_the_limit() -> str:
    """16 MiB that the validation keeps, and their copy, under a limit of 30 MiB."""
    try:
        train(KeptOutputs, MicroBatching(), MemoryLimit("30MiB"), steps=32)
    except torch.OutOfMemoryError:
        return "out of memory"
    return "passed"


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "weights of messages": [
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "good", "weight": 1},
    ],
    "tool calls": [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "content": "good"},
    ],
}


def chats(name: str) -> str:
    """Whether only what should be learned is learned: what is called `good`, and nothing called `bad`."""
    rows = [{"messages": [{"role": "user", "content": f"question {n}"}, *CHATS[name]]} for n in range(40)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: list[Any] = []

    def act() -> None:
        data = ChatData(
            dataset="chats.jsonl", tokenizer="bytes", chat_template="chatml", sequence_length=256, batch_size=2,
            num_workers=0,
        )  # fmt: skip
        data.prepare_data()
        data.setup("fit")
        found.append(next(iter(data.train_dataloader())))

    ended = outcome(act, "learned")
    if ended != "learned":
        return ended
    text = "".join(chr(one) for one in found[0]["labels"][0].tolist() if 31 < one < 127)
    return "learned" if "good" in text and "bad" not in text else "WRONG"


def small(size: int = 4, **options: Any) -> Callbacks:
    return lambda: [MicroBatching(micro_batch_size=size, **options)]


def limited(limit: int, **options: Any) -> Callbacks:
    return lambda: [MicroBatching(**options), MemoryLimit(limit)]


AGAINST_PLAIN: tuple[tuple[str, str, Callable[[], Any], Callbacks, str, str], ...] = (
    ("packed sequences", "MemFit", Packed, lambda: [MemFit()], "exact", "packed RNNs of pytorch-forecasting"),
    ("packed sequences", "MicroBatching", Packed, small(), "exact or refused", "padding in pytorch-forecasting"),
    ("contrastive", "MicroBatching", Contrastive, small(), "refused", "SimCLR of lightly"),
    (
        "contrastive, batch statistics allowed", "MicroBatching", Contrastive,
        small(allow_batch_statistics=True), "refused", "SimCLR of lightly",
    ),
    ("graph batches", "MemFit", Graphs, lambda: [MemFit()], "exact", "chemprop, PyG"),
    ("graph batches", "MicroBatching", Graphs, small(), "exact or refused", "chemprop, PyG"),
    ("graph batches", "MemoryPrediction", Graphs, lambda: [MemoryPrediction()], "exact", "chemprop, PyG"),
    ("plateau", "MemFit", Plateau, lambda: [MemFit()], "exact", "lightning-hydra-template"),
    ("norm under a limit", "MicroBatching", Normalised, limited(200_000), "exact or refused", "tabular models"),
    ("episodes under a limit", "MicroBatching", Episodes, limited(6000), "exact or refused", "few-shot episodes"),
    ("episodes", "MicroBatching", Episodes, small(8), "refused", "few-shot episodes"),
    ("seeding copy", "MemoryPrediction", Environment, lambda: [MemoryPrediction()], "exact", "rl4co"),
    ("data of setup", "MemFit", DataOfSetup, lambda: [MemFit()], "exact", "Lightning's tutorials"),
    ("masked weights", "MicroBatching", MaskedWeights, small(), "exact", "PixelCNN"),
    ("tensor subclass", "MemoryPrediction", Images, lambda: [MemoryPrediction()], "exact", "anomalib"),
    ("tensor subclass", "MemFit", Images, lambda: [MemFit()], "exact", "anomalib"),
)  # fmt: skip

NOT_TRIED = {
    "Adafactor's trace": ("profile_module", "at most twice the time of SGD's trace"),
    "generate in validation": ("MemoryPrediction", "peaks of training and validation are told apart"),
    "kept outputs, message": ("MicroBatching", "says what earlier batches keep, and where it was made"),
    "TCN under a limit": ("MemFit", "the module's numbers stay while a size fits"),
    "optimizer step above the limit": ("MicroBatching", "names the optimizer step and what helps it"),
    "ViT-L in half precision": ("profile_module", "the peak of a GPU"),
    "optimizer stepped in backward": ("profile_module", "the peak of a GPU"),
    "ranks that log other names": ("DataParallelStrategy", "an error that names both"),
    "one SLURM task of two": ("DataParallelStrategy", "names --ntasks-per-node"),
    "uneven batches of ranks": ("MicroBatching", "summed over ranks"),
    "checkpoint that is a folder": ("FullyShardedStrategy", "loads, or names what does"),
    "batch norm under ZeRO": ("ZeroStrategy", "exact or refused"),
    "killed rank": ("DataParallelStrategy", "names the rank"),
    "LoRA under FSDP2": ("Lora", "exact"),
}
"""What needs a GPU, a cluster or a clock, or is about a message: the public name, and what is wanted."""


def trials() -> Iterator[Trial]:
    """All of them."""

    def trial(case: str, tried: str, wanted: str, source: str, run: Callable[[], str]) -> Trial:
        return Trial(case, "reported", tried, wanted, source, run)

    yield trial(
        "older lightning", "MicroBatching", "exact or skipped", "lightly, neuralforecast, darts", older_lightning
    )
    for case, tried, make, callbacks, wanted, source in AGAINST_PLAIN:
        yield trial(case, tried, wanted, source, partial(against_plain, make, callbacks))
    run = partial(accepted, Normalised, limited(200_000, allow_batch_statistics=True))
    yield trial("norm under a limit, batch statistics allowed", "MicroBatching", "accepted", "tabular models", run)
    run = partial(predicted, HeldBySetup)
    yield trial("held data of setup", "MemoryPrediction", "peak", "Lightning's tutorials", run)
    yield trial("held data", "MemoryPrediction", "peak", "Lightning's tutorials", partial(predicted, HeldData))
    fixed = MicroBatching(micro_batch_size=64, allow_batch_statistics=True)
    yield trial("fixed micro-batch", "MemoryPrediction", "peak", "a report", partial(predicted, Deep, fixed))
    yield trial("peak of the optimizer", "MicroBatching", "largest size", "Muon", sizes_found)
    yield trial("kept outputs", "MemoryLimit", "out of memory", "Lightning 8453, 5735, 8215", kept_beyond_the_limit)
    for name in CHATS:
        yield trial(name, "ChatData", "learned", "slime 1008", partial(chats, name))
    for case, (tried, wanted) in NOT_TRIED.items():
        yield trial(case, tried, wanted, "a report", lambda: "not tried")
