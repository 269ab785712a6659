"""Activation checkpointing in plain torch: repeated blocks and per-block policies."""
