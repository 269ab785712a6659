"""Hold Python's cyclic garbage collector back while a trace or its imports run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leave reference cycles alone until the end; nested uses and a collector that was off before are respected.

    A collection frees the tensors of cycles at a moment that depends on everything else the process has made, so that
    two traces of one step would differ. It also walks all of torch's and transformers' objects again and again: a
    quarter of the time that a cold estimate takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
