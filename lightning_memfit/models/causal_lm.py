"""`CausalLM`: any Hugging Face causal language model as a LightningModule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_memfit.models.architecture import build, is_encoder_decoder, max_positions, resolve_config
from lightning_memfit.models.metrics import LossPerplexity, WeightedMean
from lightning_memfit.models.optimizer import checked_options, cosine_with_warmup, optimizer_class, weight_decay_groups
from lightning_memfit.models.trained import ARCHITECTURE_KEY, GENERATION_KEY, export_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class CausalLM(pl.LightningModule):
    """Fine-tune a pretrained causal language model, or train the same architecture from random weights.

    Batches are dictionaries with `input_ids` and `labels`, both `(batch, length)` integers; labels of -100 are not
    predicted. The module logs `train_loss`, `val_loss`, `val_perplexity` (and `test_*`); losses are in nats per token.

    Args:
        pretrained: Hub name or local folder (safetensors) of the model to fine-tune. Null: random weights.
        config_name: Hub name or local folder whose architecture is built when `pretrained` is null.
        config: Inline architecture with its `model_type`, or entries that change the named one.
        attn_implementation: Attention kernel: `sdpa`, `eager` or `flash_attention_2`.
        learning_rate: Peak learning rate.
        min_learning_rate_fraction: Learning rate at the end of the cosine, as a fraction of the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of weight matrices; biases and norms have none.
        optimizer: Name in `torch.optim`, or the import path of an optimizer class.
        optimizer_options: Further arguments of the optimizer, for example `betas: [0.9, 0.95]`.

    Raises:
        ValueError: If an argument is out of range.
    """

    encoder_decoder = False

    def __init__(
        self,
        pretrained: str | None = None,
        config_name: str | None = None,
        config: dict[str, Any] | None = None,
        attn_implementation: str = "sdpa",
        learning_rate: float = 5e-5,
        min_learning_rate_fraction: float = 0.1,
        warmup_steps: int = 0,
        weight_decay: float = 0.1,
        optimizer: str = "AdamW",
        optimizer_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        for argument in ("learning_rate", "min_learning_rate_fraction", "warmup_steps", "weight_decay"):
            high = 1.0 if argument == "min_learning_rate_fraction" else math.inf
            if not 0 <= self.hparams[argument] <= high or math.isinf(self.hparams[argument]):
                raise ValueError(f"`{argument}={self.hparams[argument]}` must be between 0 and {high}.")
        self._optimizer_class: Callable[..., torch.optim.Optimizer] = optimizer_class(optimizer)
        self._optimizer_options = checked_options(optimizer_options)
        self.model: PreTrainedModel | None = None
        self._architecture: PretrainedConfig | None = None
        self.val_loss, self.test_loss = WeightedMean(), WeightedMean()
        self.val_perplexity, self.test_perplexity = LossPerplexity(), LossPerplexity()

    # --- the model --------------------------------------------------------------------------------------------------

    @property
    def architecture(self) -> PretrainedConfig:
        """The Hugging Face configuration, read once.

        Raises:
            ValueError: If there is none, or it is one of another kind of model.
        """
        if self._architecture is None:
            config = resolve_config(*(self.hparams[name] for name in ("pretrained", "config_name", "config")))
            if is_encoder_decoder(config) != self.encoder_decoder:
                other = "CausalLM" if self.encoder_decoder else "Seq2SeqLM"
                raise ValueError(f"{type(self).__name__} can't train a {config.model_type!r} model: use {other}.")
            self._architecture = config
        return self._architecture

    @override
    def configure_model(self) -> None:
        """Build the model in the precision and on the device that Lightning asks for. A second call does nothing."""
        if self.model is None:
            self.model = build(self.architecture, self.hparams["pretrained"], self.hparams["attn_implementation"])
            self.model.train()

    @property
    def network(self) -> Any:
        """The Hugging Face model.

        Raises:
            RuntimeError: If it is not built yet.
        """
        if self.model is None:
            raise RuntimeError("The model is built by `configure_model()`, which has not been called yet.")
        return self.model

    @override
    def setup(self, stage: str) -> None:
        """Refuse data that the architecture cannot take, before any weight is loaded."""
        datamodule = getattr(self.trainer, "datamodule", None)
        for argument in ("sequence_length", "source_length", "target_length"):
            self._check_length(getattr(datamodule, argument, None), argument)
        vocabulary = getattr(datamodule, "vocab_size", None)
        known: int = self.architecture.get_text_config().vocab_size
        if vocabulary is not None and vocabulary > known:
            # Tokenizers may have tokens for more than text (Gemma 3's for images), which text models leave out.
            largest = getattr(datamodule, "largest_id", lambda: None)()
            if largest is not None and largest < known:
                return
            raise ValueError(
                f"The tokenizer has {vocabulary} tokens, the model {known}. "
                "Use the model's own tokenizer (`data.tokenizer`) or a larger `config.vocab_size`."
            )

    def _check_length(self, length: int | None, argument: str) -> None:
        positions = max_positions(self.architecture)
        if length is not None and positions is not None and length > positions:
            raise ValueError(
                f"`{argument}={length}` is longer than the model's {positions} positions. "
                f"Set `data.{argument}` to at most {positions}."
            )

    @override
    def forward(self, input_ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        """Call the Hugging Face model, without a key-value cache unless asked for."""
        inputs = arguments if input_ids is None else {"input_ids": input_ids, **arguments}
        return self.network(**inputs)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.encoder_decoder:
            self._check_length(batch["labels"].shape[1], "target_length")
        self._check_length(batch["input_ids"].shape[1], "source_length" if self.encoder_decoder else "sequence_length")
        loss: torch.Tensor = self(**batch).loss
        return loss

    @override
    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the most likely next token at every position, `(batch, length)`."""
        # Labels make the decoder's input, but only the loss of a decoder alone.
        inputs = {name: value for name, value in batch.items() if name != "labels" or self.encoder_decoder}
        tokens: torch.Tensor = self(**inputs).logits.argmax(dim=-1)
        return tokens

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss of a micro-batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    @override
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log loss and perplexity."""
        self._evaluate("val", batch, batch_idx)

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log loss and perplexity."""
        self._evaluate("test", batch, batch_idx)

    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log loss and perplexity, weighted by predicted tokens."""
        mean, perplexity = getattr(self, f"{stage}_loss"), getattr(self, f"{stage}_perplexity")
        loss = self._loss({**batch, **self._tokens_alone})
        labels = batch["labels"] if self.encoder_decoder else batch["labels"][:, 1:]
        predicted = (labels != -100).sum()
        loss = torch.where(predicted > 0, loss, 0.0)  # the mean over no tokens is NaN, and would stay in the metrics
        mean.update(loss, predicted)
        perplexity.update(loss, predicted)
        size = len(batch["labels"])
        self.log(f"{stage}_loss", mean, prog_bar=True, batch_size=size)
        self.log(f"{stage}_perplexity", perplexity, batch_size=size)

    @property
    def _tokens_alone(self) -> dict[str, Any]:
        """What asks a mixture of experts for its loss in nats per token, without what balances its experts."""
        balances = getattr(self.architecture.get_text_config(), "output_router_logits", False)
        return {"output_router_logits": False} if balances else {}

    # --- optimization -----------------------------------------------------------------------------------------------

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer (biases and norms undecayed) and a cosine schedule that counts optimizer steps."""
        groups = weight_decay_groups(self, self.hparams["weight_decay"])
        optimizer = self._optimizer_class(groups, lr=self.hparams["learning_rate"], **self._optimizer_options)
        factor = partial(
            cosine_with_warmup,
            warmup_steps=self.hparams["warmup_steps"],
            total_steps=self._total_steps(),
            floor=self.hparams["min_learning_rate_fraction"],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def _total_steps(self) -> int:
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ValueError("The cosine schedule needs the run's length: set `max_steps` or `max_epochs`.")
        warmup = self.hparams["warmup_steps"]
        if warmup >= total:
            rank_zero_warn(f"`warmup_steps={warmup}`, but the run has {total} optimizer steps: it ends warming up.")
        return int(total)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the architecture, with which a checkpoint loads without the hub.

        What the pretrained model says of generation (ends, suppressed tokens, languages) goes along.
        """
        checkpoint[ARCHITECTURE_KEY] = self.network.config.to_dict()
        generation = getattr(self.network, "generation_config", None)
        if generation is not None:
            checkpoint[GENERATION_KEY] = generation.to_dict()

    # --- what comes out ---------------------------------------------------------------------------------------------

    def export(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
        """Write a Hugging Face folder that `from_pretrained` loads again, on all ranks; see `export_folder`."""
        return export_folder(self.network, folder, tokenizer)
