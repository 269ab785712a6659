"""LightningDataModules that ship with the package."""

from lightning_memfit.data.chats import ChatData
from lightning_memfit.data.pairs import PairData
from lightning_memfit.data.random_data import RandomTensors, RandomTokens
from lightning_memfit.data.standard_library import StandardLibraryChats, StandardLibraryPairs, StandardLibraryText
from lightning_memfit.data.text import TextData

__all__ = [
    "ChatData",
    "PairData",
    "RandomTensors",
    "RandomTokens",
    "StandardLibraryChats",
    "StandardLibraryPairs",
    "StandardLibraryText",
    "TextData",
]
