"""The micro-batched step: callback, loop, session, the effective step, and what it needs of batches and ranks."""
