"""Adapters of peft on any module, and frozen linear layers in 4 or 8 bits."""
