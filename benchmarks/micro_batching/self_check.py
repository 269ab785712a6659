"""The zoo of `exactness.py` with `SelfCheck` in the place of `ExactnessCheck`: micro-batches of 3, and memory running out.

python -m benchmarks.micro_batching.self_check [NAME ...]
"""

import sys

import torch

from benchmarks.micro_batching import exactness
from lightning_memfit.fitting.step import session
from lightning_memfit.fitting.step.check import SelfCheck

if __name__ == "__main__":
    torch.set_num_threads(1)
    session.ExactnessCheck = SelfCheck  # type: ignore[misc, assignment]
    exactness.SIZES = (3,)  # type: ignore[assignment]
    exactness.main(["--only", *(sys.argv[1:] or exactness.THEMES)])
