"""Runs that end, fail or go on again: signals, numbers that are not finite, windows of batches, and ranks that fail."""
