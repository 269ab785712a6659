"""Recurrent nets and audio: packed sequences, states carried from batch to batch, CTC, lengths."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.zoo.base import BATCH, CLASSES, EVEN, NUM_SAMPLES, Case, Lit, classes, floats, ints

MELS = 4


def recordings(num: int = NUM_SAMPLES) -> list[Any]:
    """Frames of uneven length, and a few symbols for each recording."""
    lengths, counts = ints(6, 12, num, seed=1).tolist(), ints(1, 3, num, seed=2).tolist()
    return [
        (floats(length, MELS, seed=index), ints(1, 5, count, seed=index), label)
        for index, (length, count, label) in enumerate(zip(lengths, counts, classes(num).tolist(), strict=True))
    ]


class Recurrent(Lit):
    """Classifies recordings by the last state."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.rnn, self.head = kind(MELS, 8, batch_first=True), nn.Linear(8, CLASSES)
        self.data = recordings()

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        frames, _, labels = zip(*samples, strict=True)
        lengths = torch.tensor([len(one) for one in frames])
        return {"frames": pad_sequence(frames, batch_first=True), "lengths": lengths, "y": torch.tensor(labels)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, _ = self.rnn(batch["frames"])
        last = out[torch.arange(len(out)), batch["lengths"] - 1]
        loss = F.cross_entropy(self.head(last), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Packed(Recurrent):
    """The same with packed sequences; the padding that comes out is as long as the part's longest."""

    def __init__(self, mean_over: str) -> None:
        super().__init__(nn.GRU)
        self.mean_over = mean_over

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(batch["frames"], batch["lengths"].cpu(), batch_first=True, enforce_sorted=False)
        out, last = self.rnn(packed)
        if self.mean_over == "frames":
            loss = (self.head(out.data) - out.data.mean(1, keepdim=True)).square().mean()
        else:
            padded, _ = pad_packed_sequence(out, batch_first=True)
            loss = F.cross_entropy(self.head(last[0]), batch["y"]) + 0.1 * (padded.sum(1) / 10).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class CarriedState(Lit):
    """Truncated backpropagation through time: the state of one batch begins the next."""

    drop_last = True

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(MELS, 8, batch_first=True), nn.Linear(8, MELS)
        self.state: Tensor | None = None
        self.data = floats(EVEN, 5, MELS, seed=1)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        out, state = self.rnn(x[:, :-1], self.state)
        self.state = state.detach()
        loss = (self.head(out) - x[:, 1:]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class MeanStateCarried(CarriedState):
    """The mean state of a batch begins the next, so that the shapes of all parts fit."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        before = None if self.state is None else self.state.expand(1, len(x), -1).contiguous()
        out, state = self.rnn(x[:, :-1], before)
        self.state = state.detach().mean(1, keepdim=True)
        loss = (self.head(out) - x[:, 1:]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Ctc(Lit):
    """Frames (batch, time, mels) and symbols, padded or one after another."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(MELS, 12), nn.Tanh(), nn.Linear(12, 5))
        self.data = [(frames, symbols, padded) for frames, symbols, _ in recordings()]

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        frames, symbols, (padded, *_) = zip(*samples, strict=True)
        return {
            "frames": pad_sequence(frames, batch_first=True),
            "symbols": pad_sequence(symbols, batch_first=True) if padded else torch.cat(symbols),
            "frame_lengths": torch.tensor([len(one) for one in frames]),
            "symbol_lengths": torch.tensor([len(one) for one in symbols]),
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch["frames"]).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, batch["symbols"], batch["frame_lengths"], batch["symbol_lengths"], zero_infinity=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class TimeFirstAudio(Recurrent):
    """Frames (time, batch, mels) beside labels (batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(MELS, 8)

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        frames, _, labels = zip(*samples, strict=True)
        return {"frames": pad_sequence(frames), "y": torch.tensor(labels)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.rnn(batch["frames"])[0].mean(0)), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["y"]))
        return loss

    def samples_in(self, batch: Any) -> int:
        return len(batch["y"])


class Waveforms(Lit):
    """A list of waveforms of uneven length; the first has as many values as the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(1, CLASSES, 3, padding=1)
        labels = classes().tolist()
        self.data = [(floats(BATCH if i % 3 == 0 else 5 + i % 7, seed=i), label) for i, label in enumerate(labels)]

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        waves, labels = zip(*samples, strict=True)
        return {"waves": list(waves), "labels": list(labels)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = torch.stack([self.net(wave[None, None]).mean((0, 2)) for wave in batch["waves"]])
        loss = F.cross_entropy(out, torch.tensor(batch["labels"]))
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(out))
        return loss

    def samples_in(self, batch: Any) -> int:
        return len(batch["waves"])


class Chunks(Lit):
    """Statistics over time are normalised in each recording, with a mask from the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(MELS, CLASSES)
        self.data = recordings()

    collate = staticmethod(Recurrent.collate)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        frames, lengths = batch["frames"], batch["lengths"]
        mask = (torch.arange(frames.shape[1])[None] < lengths[:, None]).to(frames.dtype)[..., None]
        mean = (frames * mask).sum(1, keepdim=True) / lengths[:, None, None]
        loss = F.cross_entropy((self.net((frames - mean).abs()) * mask).sum(1), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


CASES = (
    Case("lstm", "LSTM over padded frames", Recurrent),
    Case("gru_packed", "packed sequences, mean over recordings", lambda: Packed("recordings")),
    Case("gru_packed_frames", "packed sequences, mean over frames", lambda: Packed("frames"), "either"),
    Case("masked_frames", "mean over time by a mask of the lengths", Chunks),
    Case("state_carried", "the state of one batch begins the next", CarriedState, "refused"),
    Case("mean_state_carried", "the mean state of one batch begins the next", MeanStateCarried, "refused"),
    Case("ctc", "frames (batch, time, mels) with CTC", lambda: Ctc(padded=True)),
    Case("ctc_concatenated", "CTC with all symbols in one row", lambda: Ctc(padded=False), "either"),
    Case("time_first_audio", "frames (time, batch, mels) beside labels (batch)", TimeFirstAudio, "either"),
    Case("waveforms", "a list of waveforms, some as long as the batch", Waveforms),
)
