"""Optimizers that step parts of weights, or many in one vector, otherwise than whole ones."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

_NEED_SHAPES = {"Adafactor", "Came", "Galoreadamw", "Lamb", "Lars", "Muon", "Shampoo", "Sm3", "Soap"}
"""Classes that step by the rows of a matrix or by the norm of a weight: DeepSpeed gives them one vector for many."""

_NEED_ALL = {"Lbfgs"}
"""Classes that join all weights in one vector, which torch can't do with parts of them."""


def check_flat(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that steps a vector of many weights otherwise than the weights one by one.

    Args:
        optimizer: The module's own.
        strategy: Name of the strategy.

    Raises:
        MisconfigurationException: If it is known to do so.
    """
    _refuse(optimizer, _NEED_SHAPES | _NEED_ALL, strategy, "DeepSpeed gives it one vector for many weights")


def check_divided(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that can't step parts of weights.

    Args:
        optimizer: The module's own.
        strategy: Name of the strategy.

    Raises:
        MisconfigurationException: If it is known to fail.
    """
    _refuse(optimizer, _NEED_ALL, strategy, "a rank has parts of weights")


def _refuse(optimizer: Optimizer, names: set[str], strategy: str, because: str) -> None:
    """Subclasses count as what they derive from."""
    if names & {kind.__name__.capitalize() for kind in type(optimizer).__mro__}:
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` would give other weights than on one device: {because} under `strategy="
            f"{strategy}`. Train with `strategy=memfit_ddp`, or choose another optimizer."
        )
