"""`CausalLM`: any Hugging Face causal language model as a LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_memfit.models.architecture import build, is_encoder_decoder, max_positions, resolve_config
from lightning_memfit.models.metrics import LossPerplexity, WeightedMean
from lightning_memfit.models.network_module import NetworkModule
from lightning_memfit.models.sampling import continue_text
from lightning_memfit.models.trained import export_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class CausalLM(NetworkModule):
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
        super().__init__(
            learning_rate, min_learning_rate_fraction, warmup_steps, weight_decay, optimizer, optimizer_options
        )
        self.save_hyperparameters()
        self.val_loss, self.test_loss = WeightedMean(), WeightedMean()
        self.val_perplexity, self.test_perplexity = LossPerplexity(), LossPerplexity()

    # --- the model --------------------------------------------------------------------------------------------------

    @override
    def read_architecture(self) -> PretrainedConfig:
        """Return the Hugging Face configuration."""
        hparams = self.hparams
        config = resolve_config(hparams["pretrained"], hparams["config_name"], hparams["config"])
        if is_encoder_decoder(config) != self.encoder_decoder:
            other = "CausalLM" if self.encoder_decoder else "Seq2SeqLM"
            raise ValueError(f"{type(self).__name__} can't train a {config.model_type!r} model: use {other}.")
        return config

    @override
    def make_network(self) -> PreTrainedModel:
        """Build the Hugging Face model."""
        return build(self.architecture, self.hparams["pretrained"], self.hparams["attn_implementation"])

    @override
    def setup(self, stage: str) -> None:
        """Refuse data that the architecture cannot take, before any weight is loaded."""
        datamodule = getattr(self.trainer, "datamodule", None)
        self._check_length(getattr(datamodule, "sequence_length", None))
        vocabulary = getattr(datamodule, "vocab_size", None)
        known: int = self.architecture.get_text_config().vocab_size
        if vocabulary is not None and vocabulary > known:
            # Tokenizers may have tokens for more than text (Gemma 3's for images), which text models leave out.
            find = getattr(datamodule, "largest_id", None)
            largest = find() if find is not None else None
            if largest is not None and largest < known:
                return
            raise ValueError(
                f"The tokenizer has {vocabulary} tokens, the model {known}. "
                "Use the model's own tokenizer (`data.tokenizer`) or a larger `config.vocab_size`."
            )

    def _check_length(self, length: int | None, argument: str = "sequence_length") -> None:
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

    @override
    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if "input_ids" in batch:
            self._check_length(batch["input_ids"].shape[1])
        loss: torch.Tensor = self(**batch).loss
        return loss

    @override
    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the most likely next token at every position, `(batch, length)`."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        tokens: torch.Tensor = self(**inputs).logits.argmax(dim=-1)
        return tokens

    @override
    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log loss and perplexity, weighted by predicted tokens."""
        mean, perplexity = getattr(self, f"{stage}_loss"), getattr(self, f"{stage}_perplexity")
        loss = self._loss({**batch, **self._tokens_alone})
        predicted = self._num_predicted(batch["labels"])
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

    def _num_predicted(self, labels: torch.Tensor) -> torch.Tensor:
        return (labels[:, 1:] != -100).sum()

    # --- what comes out ---------------------------------------------------------------------------------------------

    def export(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
        """Write a Hugging Face folder that `from_pretrained` loads again, on all ranks; see `export_folder`."""
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
