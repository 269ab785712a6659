"""LightningModules that ship with the package."""

from lightning_memfit.models.causal_lm import CausalLM
from lightning_memfit.models.seq2seq_lm import Seq2SeqLM
from lightning_memfit.models.sequence_classifier import SequenceClassifier

__all__ = ["CausalLM", "Seq2SeqLM", "SequenceClassifier"]
