"""Bytes of a training step by category, phase and tier: pure arithmetic over a profile or a parameter table."""
