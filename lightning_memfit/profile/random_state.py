"""Give the random generators of torch, NumPy and Python back as they were found."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Undo what the code within draws from the CPU generators: a profile must not change the run that follows it."""
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002  (the global generator, which user code may draw from)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
