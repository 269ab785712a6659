"""Audio tagging: an audio spectrogram transformer (AST) says which of many sounds are in a recording.

    memfit fit --config examples/audio_tagger.yaml --data.folder=recordings
    memfit fit --config examples/audio_tagger.yaml --config examples/audio_tagger_quick.yaml  # two steps on one CPU

An ordinary LightningModule: the techniques are callbacks of the recipe. Needs datasets and soundfile.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import soundfile
import torch
from datasets import load_dataset
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MultilabelAveragePrecision
from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification

RATE = 16_000
"""Samples per second that the model hears."""


class AudioTagger(pl.LightningModule):
    """Fine-tune an AST; logs `train_loss`, in nats per tag, and `train_map`, the mean average precision of the tags.

    Args:
        num_tags: Number of tags.
        pretrained: Hub name or local folder of the model. Null: random weights of the architecture `config`.
        config: Arguments of `ASTConfig`.
        learning_rate: Constant learning rate of AdamW.
    """

    def __init__(
        self,
        num_tags: int,
        pretrained: str | None = "MIT/ast-finetuned-audioset-10-10-0.4593",
        config: dict[str, Any] | None = None,
        learning_rate: float = 1e-5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: Any = None
        self.train_map = MultilabelAveragePrecision(num_tags, thresholds=20)

    def configure_model(self) -> None:
        if self.network is not None:
            return
        tags = self.hparams["num_tags"]
        if self.hparams["pretrained"] is None:
            self.network = ASTForAudioClassification(ASTConfig(**self.hparams["config"], num_labels=tags))
        else:
            self.network = ASTForAudioClassification.from_pretrained(
                self.hparams["pretrained"], num_labels=tags, ignore_mismatched_sizes=True
            ).train()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.network(batch["input_values"]).logits
        loss = F.binary_cross_entropy_with_logits(logits, batch["tags"].to(logits.dtype))
        self.train_map(logits.detach(), batch["tags"].long())
        self.log("train_loss", loss.detach(), prog_bar=True)
        self.log("train_map", self.train_map, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams["learning_rate"])


class TaggedRecordings(pl.LightningDataModule):
    """Sound files of a folder, and their tags in its `metadata.jsonl`: {"file_name": ..., "tags": ["dog", "rain"]}.

    Args:
        folder: The folder, with recordings of 16,000 samples per second. Null: 16 tones with three tags, to try a run.
        frames: Frames of a spectrogram, 100 for a second; the rest of a longer recording is cut off.
        mel_bins: Its bins.
        batch_size: Recordings of an optimizer step.
        num_workers: Loader processes.
    """

    def __init__(
        self, folder: str | None, frames: int = 1024, mel_bins: int = 128, batch_size: int = 32, num_workers: int = 4
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.extract = ASTFeatureExtractor(num_mel_bins=self.hparams["mel_bins"], max_length=self.hparams["frames"])
        if self.hparams["folder"] is None:
            times = np.arange(RATE) / RATE
            tones = [np.sin(2 * math.pi * 110 * n * times) for n in range(1, 17)]
            self.rows: Any = [{"sound": tone, "tags": [f"tone {n % 3}"]} for n, tone in enumerate(tones)]
        else:
            folder = Path(self.hparams["folder"]).expanduser()
            listed = load_dataset("json", data_files=str(folder / "metadata.jsonl"), split="train")
            self.rows = [{"file": folder / row["file_name"], "tags": row["tags"]} for row in listed]
        tags = sorted({tag for row in self.rows for tag in row["tags"]})
        self.places = {tag: place for place, tag in enumerate(tags)}

    def read(self, file: Path) -> np.ndarray:
        sound, rate = soundfile.read(file, dtype="float32", always_2d=True)
        if rate != RATE:
            raise ValueError(f"{file} has {rate} samples per second. Resample it to {RATE}.")
        return sound.mean(axis=1)

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sounds = [row["sound"] if "sound" in row else self.read(row["file"]) for row in rows]
        values = self.extract(sounds, sampling_rate=RATE, return_tensors="pt").input_values
        tags = torch.zeros(len(rows), len(self.places))
        for number, row in enumerate(rows):
            tags[number, [self.places[tag] for tag in row["tags"]]] = 1
        return {"input_values": values, "tags": tags}

    def train_dataloader(self) -> DataLoader[Any]:
        size, workers = self.hparams["batch_size"], self.hparams["num_workers"]
        return DataLoader(self.rows, size, shuffle=True, collate_fn=self.collate, num_workers=workers)
