"""Image classification: a model of transformers on images that torchvision reads, one folder for each class.

    memfit fit --config examples/vision.yaml --data.folder=images
    memfit fit --config examples/vision.yaml --config examples/vision_quick.yaml  # two steps on one CPU, no network

An ordinary LightningModule: the techniques are callbacks of the recipe. Needs torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchvision
from torch.utils.data import DataLoader
from torchmetrics import Accuracy
from torchvision.transforms import v2
from transformers import AutoConfig, AutoModelForImageClassification


class ImageClassifier(pl.LightningModule):
    """Fine-tune an image classifier; logs `train_loss`, `val_loss` (nats per image) and `val_accuracy`.

    Args:
        pretrained: Hub name or local folder of the model. Null: random weights of the architecture `config`.
        config: Arguments of the architecture, with its `model_type`.
        num_classes: Number of classes; a pretrained head for others gives way to a new one.
        learning_rate: Constant learning rate of AdamW.
        weight_decay: Its weight decay.
    """

    def __init__(
        self,
        pretrained: str | None = "google/vit-base-patch16-224",
        config: dict[str, Any] | None = None,
        num_classes: int = 10,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: Any = None
        self.val_accuracy = Accuracy("multiclass", num_classes=num_classes)

    def configure_model(self) -> None:
        if self.network is not None:
            return
        classes = self.hparams["num_classes"]
        if self.hparams["pretrained"] is None:
            config = AutoConfig.for_model(**self.hparams["config"], num_labels=classes)
            self.network = AutoModelForImageClassification.from_config(config)
        else:
            self.network = AutoModelForImageClassification.from_pretrained(
                self.hparams["pretrained"], num_labels=classes, ignore_mismatched_sizes=True
            ).train()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = self.network(pixel_values=images, labels=labels).loss
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        output = self.network(pixel_values=images, labels=labels)
        self.val_accuracy(output.logits, labels)
        self.log("val_loss", output.loss, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(), self.hparams["learning_rate"], weight_decay=self.hparams["weight_decay"]
        )


class Images(pl.LightningDataModule):
    """Images of `folder/train/CLASS/NAME.jpg` and `folder/val/CLASS/NAME.jpg`.

    Args:
        folder: The folder. Null: random images of 10 classes, to try a run.
        image_size: Pixels a side.
        batch_size: Images of an optimizer step; `MicroBatching` cuts it to fit.
        num_workers: Loader processes.
    """

    def __init__(self, folder: str | None, image_size: int = 224, batch_size: int = 256, num_workers: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def _loader(self, split: str) -> DataLoader[Any]:
        size, is_training = self.hparams["image_size"], split == "train"
        cut = [v2.RandomResizedCrop(size, (0.35, 1)), v2.RandomHorizontalFlip()]
        scaled = cut if is_training else [v2.Resize(size), v2.CenterCrop(size)]
        values = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
        transform = v2.Compose([*scaled, *values])
        if self.hparams["folder"] is None:
            images: Any = torchvision.datasets.FakeData(16, (3, size, size), 10, transform)
        else:
            images = torchvision.datasets.ImageFolder(Path(self.hparams["folder"]).expanduser() / split, transform)
        return DataLoader(
            images, self.hparams["batch_size"], shuffle=is_training, num_workers=self.hparams["num_workers"]
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")

    def example_batch(self, vocab_size: int | None = None) -> list[torch.Tensor]:
        """A batch of the right shapes, for estimates without data: any data module may have this method."""
        batch, size = self.hparams["batch_size"], self.hparams["image_size"]
        return [torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.int64)]
