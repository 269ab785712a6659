"""Optimizers in plain torch: parameter groups and 8-bit conversion."""
