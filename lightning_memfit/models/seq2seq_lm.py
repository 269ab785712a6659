"""`Seq2SeqLM`: any Hugging Face encoder-decoder language model as a LightningModule."""

from __future__ import annotations

import torch
from typing_extensions import override

from lightning_memfit.models.causal_lm import CausalLM


class Seq2SeqLM(CausalLM):
    """Fine-tune a pretrained encoder-decoder language model, or train the same architecture from random weights.

    Batches are dictionaries with `input_ids` and `attention_mask`, `(batch, source_length)`, and `labels`,
    `(batch, target_length)` integers; labels of -100 are not predicted. The model makes the decoder's input from the
    labels. Arguments and logged values are those of `CausalLM`.
    """

    encoder_decoder = True

    @override
    def setup(self, stage: str) -> None:
        """Refuse data that the architecture cannot take, before any weight is loaded."""
        super().setup(stage)
        datamodule = getattr(self.trainer, "datamodule", None)
        for argument in ("source_length", "target_length"):
            self._check_length(getattr(datamodule, argument, None), argument)

    @override
    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the most likely token at every position of the target, given the ones before, `(batch, length)`."""
        tokens: torch.Tensor = self(**batch).logits.argmax(dim=-1)
        return tokens

    @override
    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._check_length(batch["labels"].shape[1], "target_length")
        return super()._loss(batch)

    @override
    def _num_predicted(self, labels: torch.Tensor) -> torch.Tensor:
        return (labels != -100).sum()
