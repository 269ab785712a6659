"""Choosing for a module, a global batch and a machine the fastest setting that fits, with reasons."""
