"""`CausalLM`: any Hugging Face causal language model as a LightningModule.

Two helpers come first: a perplexity metric that needs no logits, and torch's random state, kept in checkpoints so that
dropout continues where it stopped.
"""

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
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from lightning_memfit.models.architecture import build, is_encoder_decoder, max_positions, resolve_config
from lightning_memfit.models.optimizer import checked_options, cosine_with_warmup, optimizer_class, weight_decay_groups
from lightning_memfit.models.sampling import continue_text
from lightning_memfit.models.trained import ARCHITECTURE_KEY, export_folder

# --- perplexity from the losses: no second softmax over the vocabulary ------------------------------------------------


class LossPerplexity(Metric):
    """Perplexity `exp(sum of token losses / tokens)` over all updates and processes.

    It equals `torchmetrics.text.Perplexity`, which needs the logits and another `(batch, length, vocabulary)` tensor.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    total: torch.Tensor
    tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, mean_loss: torch.Tensor, num_tokens: torch.Tensor | int) -> None:
        """Add one batch.

        Args:
            mean_loss: Mean cross-entropy in nats of the batch's predicted tokens.
            num_tokens: Number of tokens in that mean.
        """
        self.total += mean_loss.detach().float() * num_tokens
        self.tokens += num_tokens

    @override
    def compute(self) -> torch.Tensor:
        """Return the perplexity so far; NaN before the first token."""
        return torch.exp(self.total / self.tokens)


# --- random state -----------------------------------------------------------------------------------------------------


def collect_random_state() -> dict[str, Any]:
    """Return the state of the CPU generator and of every visible CUDA device's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to a state from `collect_random_state`, for the devices that this machine has."""
    torch.set_rng_state(state["cpu"].cpu())
    for index, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(value.cpu(), index)


# --- the module -------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_RANDOM_STATE = "memfit_random_state"


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
        _check_range("learning_rate", learning_rate, 0.0)
        _check_range("min_learning_rate_fraction", min_learning_rate_fraction, 0.0, 1.0)
        _check_range("warmup_steps", warmup_steps, 0)
        _check_range("weight_decay", weight_decay, 0.0)
        self.save_hyperparameters()
        self._optimizer_class: Callable[..., torch.optim.Optimizer] = optimizer_class(optimizer)
        self._optimizer_options = checked_options(optimizer_options)
        self.model: PreTrainedModel | None = None
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()
        self.val_perplexity, self.test_perplexity = LossPerplexity(), LossPerplexity()
        self._architecture: PretrainedConfig | None = None
        self._random_state: dict[str, Any] | None = None

    # --- the model --------------------------------------------------------------------------------------------------

    @property
    def architecture(self) -> PretrainedConfig:
        """The Hugging Face configuration, read once."""
        if self._architecture is None:
            hparams = self.hparams
            config = resolve_config(hparams["pretrained"], hparams["config_name"], hparams["config"])
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

    @override
    def setup(self, stage: str) -> None:
        """Refuse data that the architecture cannot take, before any weight is loaded."""
        datamodule = getattr(self.trainer, "datamodule", None)
        self._check_length(getattr(datamodule, "sequence_length", None))
        vocabulary = getattr(datamodule, "vocab_size", None)
        if vocabulary is not None and vocabulary > self.architecture.vocab_size:
            # Tokenizers may have tokens for more than text (Gemma 3's for images), which text models leave out.
            find = getattr(datamodule, "largest_id", None)
            largest = find() if find is not None else None
            if largest is not None and largest < self.architecture.vocab_size:
                return
            raise ValueError(
                f"The tokenizer has {vocabulary} tokens, the model {self.architecture.vocab_size}. "
                "Use the model's own tokenizer (`data.tokenizer`) or a larger `config.vocab_size`."
            )

    def _check_length(self, length: int | None, argument: str = "sequence_length") -> None:
        positions = max_positions(self.architecture)
        if length is not None and positions is not None and length > positions:
            raise ValueError(
                f"`{argument}={length}` is longer than the model's {positions} positions. "
                f"Set `data.{argument}` to at most {positions}."
            )

    @property
    def network(self) -> PreTrainedModel:
        """The Hugging Face model.

        Raises:
            RuntimeError: If the model is not built yet.
        """
        if self.model is None:
            raise RuntimeError("The model is built by `configure_model()`, which has not been called yet.")
        return self.model

    @override
    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Call the Hugging Face model, without a key-value cache unless asked for."""
        return self.network(input_ids=input_ids, **arguments)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._check_length(batch["input_ids"].shape[1])
        loss: torch.Tensor = self(**batch).loss
        return loss

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss of a micro-batch in nats per token."""
        loss = self._loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=batch["input_ids"].shape[0])
        return loss

    @override
    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log loss and perplexity, weighted by predicted tokens."""
        self._evaluate("val", batch, self.val_loss, self.val_perplexity)

    @override
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log loss and perplexity, weighted by predicted tokens."""
        self._evaluate("test", batch, self.test_loss, self.test_perplexity)

    @override
    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the most likely next token at every position, `(batch, length)`."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        tokens: torch.Tensor = self(**inputs).logits.argmax(dim=-1)
        return tokens

    def _evaluate(
        self, stage: str, batch: dict[str, torch.Tensor], mean: MeanMetric, perplexity: LossPerplexity
    ) -> None:
        loss = self._loss(batch)
        predicted = self._num_predicted(batch["labels"])
        loss = torch.where(predicted > 0, loss, 0.0)  # the mean over no tokens is NaN, and would stay in the metrics
        mean.update(loss, predicted)
        perplexity.update(loss, predicted)
        size = batch["input_ids"].shape[0]
        self.log(f"{stage}_loss", mean, prog_bar=True, batch_size=size)
        self.log(f"{stage}_perplexity", perplexity, batch_size=size)

    def _num_predicted(self, labels: torch.Tensor) -> torch.Tensor:
        return (labels[:, 1:] != -100).sum()

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
        """Add architecture (a checkpoint loads without the hub) and random state (dropout continues exactly)."""
        checkpoint[ARCHITECTURE_KEY] = self.network.config.to_dict()
        checkpoint[_RANDOM_STATE] = collect_random_state()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random state for the first batch."""
        self._random_state = checkpoint.get(_RANDOM_STATE)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the checkpoint's random state once, after everything that draws random numbers at the start."""
        if self._random_state is not None:
            restore_random_state(self._random_state)
            self._random_state = None

    # --- what comes out ---------------------------------------------------------------------------------------------

    def export(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
        """Write a Hugging Face folder that `from_pretrained` loads again; see `export_folder`."""
        return export_folder(self.network, folder, tokenizer)

    def generate(
        self,
        prompt: str,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
    ) -> str:
        """Return the prompt and its continuation; see `continue_text`."""
        return continue_text(self.network, tokenizer, prompt, max_new_tokens, temperature, top_k)


def _check_range(argument: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high or math.isinf(value):
        raise ValueError(f"`{argument}={value}` must be between {low} and {high}.")
