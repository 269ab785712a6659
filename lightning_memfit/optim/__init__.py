"""Optimizers in plain torch: records of known ones, conversion, bfloat16 steps, gradient release, host masters."""
