"""Names of DeepSpeed that are not public, written for DeepSpeed 0.19.8; `test_upstream_names.py` pins them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def disable_shared_memory_collectives() -> None:
    """Let gloo do all collectives on the CPU.

    DeepSpeed compiles its shared-memory collectives for a minute at first use, and they assume that all ranks are on
    one machine.
    """
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


def allow_loading_without_optimizer() -> None:
    """Let an engine without optimizer load a stage-3 checkpoint.

    `DeepSpeedEngine.load_checkpoint` ends by calling a method that only the optimizer's side of stage 3 has; with
    nothing but parameters, which are loaded by then, there is nothing left to do.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    if not hasattr(DeepSpeedZeRoOffload, "_restore_from_bit16_weights"):
        DeepSpeedZeRoOffload._restore_from_bit16_weights = lambda self: None


@contextmanager
def loading_universal(engine: Any) -> Iterator[None]:
    """Have an engine load the universal checkpoint of a folder; the option otherwise has to be known at its start."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
