"""Techniques on every architecture of transformers, and in random combinations: the same numbers, or a refusal."""
