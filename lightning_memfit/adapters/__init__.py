"""Adapters on frozen weights, and frozen weights in 4 or 8 bits, in plain torch."""
