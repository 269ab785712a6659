"""`ImageClassifier`: any Hugging Face image classifier (ViT, ConvNeXt, ...) as a LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_memfit.models.architecture import build, resolve_config
from lightning_memfit.models.metrics import WeightedMean
from lightning_memfit.models.network_module import NetworkModule
from lightning_memfit.models.trained import export_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class ImageClassifier(NetworkModule):
    """Fine-tune a pretrained image classifier with a new head, or train the architecture from random weights.

    Batches are dictionaries with `pixel_values`, `(batch, channels, height, width)` floats, and `labels`, `(batch,)`
    integers below `num_labels`. The module logs `train_loss`, `val_loss` and `val_accuracy` (and `test_*`); losses are
    in nats.

    Args:
        num_labels: Number of classes.
        pretrained: Hub name or local folder (safetensors) of the model to fine-tune. Null: random weights.
        config_name: Hub name or local folder whose architecture is built when `pretrained` is null.
        config: Inline architecture with its `model_type`, or entries that change the named one.
        attn_implementation: Attention kernel: `sdpa` or `eager`. Null: what transformers chooses.
        learning_rate: Peak learning rate.
        min_learning_rate_fraction: Learning rate at the end of the cosine, as a fraction of the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of weight matrices; biases and norms have none.
        optimizer: Name in `torch.optim`, or the import path of an optimizer class.
        optimizer_options: Further arguments of the optimizer, for example `betas: [0.9, 0.95]`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        num_labels: int,
        pretrained: str | None = None,
        config_name: str | None = None,
        config: dict[str, Any] | None = None,
        attn_implementation: str | None = None,
        learning_rate: float = 5e-5,
        min_learning_rate_fraction: float = 0.0,
        warmup_steps: int = 0,
        weight_decay: float = 0.05,
        optimizer: str = "AdamW",
        optimizer_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            learning_rate, min_learning_rate_fraction, warmup_steps, weight_decay, optimizer, optimizer_options
        )
        if num_labels < 2:
            raise ValueError(f"`num_labels={num_labels}` must be at least 2.")
        self.save_hyperparameters()
        self.val_loss, self.test_loss = WeightedMean(), WeightedMean()
        self.val_accuracy, self.test_accuracy = WeightedMean(), WeightedMean()

    @override
    def read_architecture(self) -> PretrainedConfig:
        """Return the Hugging Face configuration, with so many classes."""
        hparams = self.hparams
        config = resolve_config(hparams["pretrained"], hparams["config_name"], hparams["config"])
        config.num_labels = hparams["num_labels"]
        return config

    @override
    def make_network(self) -> PreTrainedModel:
        """Build the Hugging Face model; a pretrained head for another number of classes gives way to a new one."""
        from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        from transformers import AutoModelForImageClassification as Kind

        config, hparams = self.architecture, self.hparams
        if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            raise ValueError(f"ImageClassifier can't train a {config.model_type!r} model: it classifies no images.")
        return build(config, hparams["pretrained"], hparams["attn_implementation"], Kind, hparams["num_labels"])

    @override
    def setup(self, stage: str) -> None:
        """Refuse data with another number of classes, or other images, before any weight is loaded.

        The names of the classes become part of the architecture, and of what is exported.
        """
        data = getattr(self.trainer, "datamodule", None)
        classes, wanted = getattr(data, "num_classes", None), self.hparams["num_labels"]
        if classes is not None and classes != wanted:
            raise ValueError(f"`num_labels={wanted}`, but the data have {classes} classes. Set `model.num_labels`.")
        names = getattr(data, "classes", None)
        if (
            isinstance(names, list) and len(names) == wanted
        ):  # those of a pretrained head are others, even if there are as many
            self.architecture.id2label = dict(enumerate(names))
            self.architecture.label2id = {name: place for place, name in enumerate(names)}
        side, own = getattr(data, "image_size", None), getattr(self.architecture, "image_size", None)
        # Position embeddings are of one size; networks without them (ConvNeXt) take any.
        if side is not None and own is not None and side != own and hasattr(self.architecture, "num_attention_heads"):
            raise ValueError(
                f"`image_size={side}`, but the model's images have {own} pixels a side. Set `data.image_size: {own}`."
            )

    @override
    def forward(self, pixel_values: torch.Tensor, **arguments: Any) -> Any:
        """Call the Hugging Face model."""
        return self.network(pixel_values=pixel_values, **arguments)

    @override
    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self(**batch).loss
        return loss

    @override
    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        mean, accuracy = getattr(self, f"{stage}_loss"), getattr(self, f"{stage}_accuracy")
        output, size = self(**batch), len(batch["labels"])
        mean.update(output.loss, size)
        accuracy.update((output.logits.argmax(dim=-1) == batch["labels"]).float())
        self.log(f"{stage}_loss", mean, prog_bar=True, batch_size=size)
        self.log(f"{stage}_accuracy", accuracy, prog_bar=True, batch_size=size)

    @override
    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the likeliest class of each image, `(batch,)`."""
        classes: torch.Tensor = self(batch["pixel_values"]).logits.argmax(dim=-1)
        return classes

    def export(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder that `from_pretrained` loads again, on all ranks; see `export_folder`."""
        return export_folder(self.network, folder, None)
