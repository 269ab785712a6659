"""Micro-batches at a constant effective batch, and recovery from out-of-memory errors."""

import sys
from importlib import import_module

from lightning_memfit.fitting.step.callback import MicroBatching

__all__ = ["MicroBatching"]

# Recipes, plans and the configurations of runs written by 0.1.0 name classes by these paths.
_MOVED = {"callback": "step.callback", "prediction": "size.prediction", "oom_report": "recovery.oom_report"}

for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = import_module(f"{__name__}.{_new}")
