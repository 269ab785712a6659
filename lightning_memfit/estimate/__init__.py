"""Bytes by category, phase and tier for a Setting: pure arithmetic over a profile."""
