"""Speech recognition: Whisper on recordings and their transcripts.

    memfit fit --config examples/speech.yaml --data.folder=recordings
    memfit fit --config examples/speech.yaml --config examples/speech_quick.yaml  # two steps on one CPU, no network

An ordinary LightningModule: the techniques are callbacks of the recipe. Needs datasets, soundfile and scipy.
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
from scipy.signal import resample_poly
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from lightning_memfit.data.tokenization import BYTES, byte_tokenizer

RATE = 16_000
"""Samples per second that Whisper hears."""


class SpeechRecognizer(pl.LightningModule):
    """Fine-tune Whisper; logs `train_loss` and `val_loss`, in nats per token of the transcripts.

    Args:
        pretrained: Hub name or local folder of the model. Null: random weights of the architecture `config`.
        config: Arguments of `WhisperConfig`.
        learning_rate: Constant learning rate of AdamW.
    """

    def __init__(
        self,
        pretrained: str | None = "openai/whisper-small",
        config: dict[str, Any] | None = None,
        learning_rate: float = 1e-5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        if self.hparams["pretrained"] is None:
            self.network = WhisperForConditionalGeneration(WhisperConfig(**self.hparams["config"]))
        else:
            self.network = WhisperForConditionalGeneration.from_pretrained(self.hparams["pretrained"]).train()
        self.network.config.use_cache = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.network(**batch).loss
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.network(**batch).loss, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams["learning_rate"])


class Recordings(pl.LightningDataModule):
    """Sound files of a folder, and their transcripts in its `metadata.jsonl`: {"file_name": ..., "text": ...}.

    Args:
        folder: The folder. Null: 16 tones, to try a run.
        tokenizer: Hub name or local folder of the model; `bytes` needs no files.
        language: Language that is spoken, which models of many languages read before a transcript.
        seconds: Longest recording; the rest of a longer one is cut off.
        mel_bins: Bins of the model's spectrograms: 128 for whisper-large-v3.
        target_length: Tokens of a transcript.
        batch_size: Recordings of an optimizer step; `MicroBatching` cuts it to fit.
        num_workers: Loader processes.
    """

    def __init__(
        self,
        folder: str | None,
        tokenizer: str = "openai/whisper-small",
        language: str | None = None,
        seconds: int = 30,
        mel_bins: int = 80,
        target_length: int = 128,
        batch_size: int = 32,
        num_workers: int = 4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        hparams = self.hparams
        options = {} if hparams["language"] is None else {"language": hparams["language"], "task": "transcribe"}
        is_bytes = hparams["tokenizer"] == BYTES
        self.tokenizer = (
            byte_tokenizer() if is_bytes else AutoTokenizer.from_pretrained(hparams["tokenizer"], **options)
        )
        self.extract = WhisperFeatureExtractor(hparams["mel_bins"], chunk_length=hparams["seconds"])
        if hparams["folder"] is None:
            times = np.arange(RATE) / RATE
            rows: Any = [{"sound": np.sin(2 * math.pi * 110 * n * times), "text": f"tone {n}"} for n in range(1, 17)]
        else:
            folder = Path(hparams["folder"]).expanduser()
            listed = load_dataset("json", data_files=str(folder / "metadata.jsonl"), split="train")
            rows = [{"file": folder / row["file_name"], "text": row["text"]} for row in listed]
        generator = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(rows, [0.9, 0.1], generator)

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sounds = [row["sound"] if "sound" in row else self.read(row["file"]) for row in rows]
        features = self.extract(sounds, sampling_rate=RATE, return_tensors="pt").input_features
        labels = torch.full((len(rows), self.hparams["target_length"]), -100)
        for place, row in enumerate(rows):
            ids = self.tokenizer(row["text"]).input_ids[: labels.shape[1] - 1]
            ids = [*ids, *([] if ids[-1:] == [self.tokenizer.eos_token_id] else [self.tokenizer.eos_token_id])]
            labels[place, : len(ids)] = torch.tensor(ids)
        return {"input_features": features, "labels": labels}

    def read(self, file: Path) -> np.ndarray:
        sound, rate = soundfile.read(file, dtype="float32", always_2d=True)
        common = math.gcd(RATE, rate)
        return resample_poly(sound.mean(axis=1), RATE // common, rate // common)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val, False)

    def _loader(self, rows: Any, shuffle: bool) -> DataLoader[Any]:
        size, workers = self.hparams["batch_size"], self.hparams["num_workers"]
        return DataLoader(rows, size, shuffle=shuffle, collate_fn=self.collate, num_workers=workers)

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """A batch of the right shapes, for estimates without data: any data module may have this method."""
        batch, frames = self.hparams["batch_size"], 100 * self.hparams["seconds"]
        labels = torch.ones(batch, self.hparams["target_length"], dtype=torch.int64)
        return {"input_features": torch.zeros(batch, self.hparams["mel_bins"], frames), "labels": labels}
