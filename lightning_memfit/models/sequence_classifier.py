"""`SequenceClassifier`: any Hugging Face encoder with a classification head as a LightningModule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_memfit.models.architecture import resolve_config
from lightning_memfit.models.optimizer import checked_options, optimizer_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SequenceClassifier(pl.LightningModule):
    """Train a sequence classifier of a given architecture from random weights, at a constant learning rate.

    Batches are dictionaries with `input_ids`, `(batch, length)` integers, and `labels`, `(batch,)` integers below
    `num_labels`. The module logs `train_loss`, in nats.

    Args:
        config: Inline architecture with its `model_type`, or entries that change the named one.
        config_name: Hub name or local folder whose architecture is built.
        num_labels: Number of classes.
        attn_implementation: Attention kernel: `sdpa`, `eager` or `flash_attention_2`.
        learning_rate: Learning rate.
        weight_decay: Decay of all parameters.
        optimizer: Name in `torch.optim`, or the import path of an optimizer class.
        optimizer_options: Further arguments of the optimizer.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        config_name: str | None = None,
        num_labels: int = 2,
        attn_implementation: str = "sdpa",
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        optimizer: str = "AdamW",
        optimizer_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if num_labels < 2:
            raise ValueError(f"`num_labels={num_labels}` must be at least 2.")
        if learning_rate < 0:
            raise ValueError(f"`learning_rate={learning_rate}` must not be negative.")
        optimizer_class(optimizer), checked_options(optimizer_options)
        self.save_hyperparameters()
        self.model: Any = None

    @property
    def architecture(self) -> PretrainedConfig:
        """The Hugging Face configuration."""
        architecture = resolve_config(None, self.hparams["config_name"], self.hparams["config"])
        architecture.num_labels = self.hparams["num_labels"]
        return architecture

    @override
    def configure_model(self) -> None:
        """Build the model in the precision and on the device that Lightning asks for. A second call does nothing."""
        from transformers import AutoModelForSequenceClassification

        if self.model is None:
            attention, dtype = self.hparams["attn_implementation"], torch.get_default_dtype()
            network = AutoModelForSequenceClassification.from_config(
                self.architecture, dtype=dtype, attn_implementation=attention
            )
            self.model = network.train()

    @override
    def forward(self, **batch: torch.Tensor) -> Any:
        """Call the Hugging Face model."""
        return self.model(**batch)

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean cross-entropy of a micro-batch."""
        loss: torch.Tensor = self(**batch).loss
        self.log("train_loss", loss.detach(), batch_size=len(batch["labels"]))
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer, with all parameters in one group."""
        options = {"weight_decay": self.hparams["weight_decay"], **checked_options(self.hparams["optimizer_options"])}
        make: Any = optimizer_class(self.hparams["optimizer"])
        return make(self.parameters(), lr=self.hparams["learning_rate"], **options)  # type: ignore[no-any-return]
