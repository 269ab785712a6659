"""Splitting documents into training and validation by their content."""

import hashlib

import numpy as np


def content_hash(text: str) -> int:
    """64-bit hash of a document, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def validation_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Choose the documents with the smallest hashes for validation.

    The choice depends neither on the order of the documents nor on a seed, and equal documents fall on the same side.

    Args:
        hashes: `(documents,)` unsigned 64-bit hashes from `content_hash`.
        fraction: Share of the documents, in (0, 1).

    Returns:
        `(documents,)` booleans, true for validation; at least one of each.

    Raises:
        ValueError: If the documents cannot be split.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"`val_fraction={fraction}` must lie between 0 and 1.")
    wanted = max(1, round(len(hashes) * fraction))
    mask = hashes <= np.partition(hashes, wanted - 1)[wanted - 1] if len(hashes) else np.zeros(0, bool)
    if not mask.any() or mask.all():
        raise ValueError(
            f"{len(hashes)} documents ({len(np.unique(hashes))} different ones) cannot be split into training and "
            f"validation with `val_fraction={fraction}`. Give more documents or a smaller fraction."
        )
    return mask
