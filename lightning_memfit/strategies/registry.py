"""The strategies' names: `Trainer(strategy="memfit_zero_2")`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

_STATES = {"offload_optimizer": True}
_WEIGHTS = {"offload_parameters": True}

NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("data_parallel.DataParallelStrategy", {}),
    "fsdp2": ("fully_sharded.FullyShardedStrategy", {}),
    "zero_1": ("zero.ZeroStrategy", {"stage": 1}),
    "zero_2": ("zero.ZeroStrategy", {"stage": 2}),
    "zero_3": ("zero.ZeroStrategy", {"stage": 3}),
    "zero_offload": ("zero.ZeroStrategy", {"stage": 2, **_STATES}),
    "zero_3_offload_optimizer": ("zero.ZeroStrategy", {"stage": 3, **_STATES}),
    "zero_3_offload": ("zero.ZeroStrategy", {"stage": 3, **_STATES, **_WEIGHTS}),
    "zero_infinity_optimizer": (
        "zero_infinity.ZeroInfinityStrategy",
        {"nvme_path": None, **_STATES, "offload_parameters": False},
    ),
    "zero_infinity": ("zero_infinity.ZeroInfinityStrategy", {"nvme_path": None, **_STATES, **_WEIGHTS}),
}
"""Class below this folder, and its arguments, by the name without `memfit_` that the record in plans has."""


def register() -> None:
    """Make the strategies known to `Trainer(strategy=...)` by name, each imported once it is made.

    Safe to call twice.
    """
    for name, (path, arguments) in NAMES.items():
        StrategyRegistry.register(f"memfit_{name}", _maker(path), override=True, **arguments)


def _maker(path: str) -> Callable[..., Strategy]:
    module, _, class_name = path.rpartition(".")

    def make(**arguments: Any) -> Strategy:
        made: Strategy = getattr(import_module(f"lightning_memfit.strategies.{module}"), class_name)(**arguments)
        return made

    return make
