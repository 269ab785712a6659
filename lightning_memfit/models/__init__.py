"""LightningModules that ship with the package."""

from lightning_memfit.models.causal_lm import CausalLM

__all__ = ["CausalLM"]
