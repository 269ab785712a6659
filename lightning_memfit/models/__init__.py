"""LightningModules that ship with the package."""

from lightning_memfit.models.causal_lm import CausalLM
from lightning_memfit.models.diffusion_unet import DiffusionUNet
from lightning_memfit.models.image_classifier import ImageClassifier
from lightning_memfit.models.preference_lm import PreferenceLM
from lightning_memfit.models.seq2seq_lm import Seq2SeqLM
from lightning_memfit.models.sequence_classifier import SequenceClassifier

__all__ = ["CausalLM", "DiffusionUNet", "ImageClassifier", "PreferenceLM", "Seq2SeqLM", "SequenceClassifier"]
