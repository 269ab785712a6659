"""LightningDataModules that ship with the package."""

from lightning_memfit.data.random_tokens import RandomTokens
from lightning_memfit.data.standard_library import StandardLibraryText
from lightning_memfit.data.text import TextData

__all__ = ["RandomTokens", "StandardLibraryText", "TextData"]
