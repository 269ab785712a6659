"""The micro-batched step: callback, loop, session, the effective step, and its handling of batches and ranks."""
