"""Optimizers that step parts of weights, or many in one vector, otherwise than whole ones."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

DIVIDED = {"Lbfgs": "it joins all weights in one vector, and a rank has parts of weights"}
"""Classes that can't step parts of weights, by name, and why."""

FLAT = {
    **DIVIDED,
    **dict.fromkeys(
        ("Adafactor", "Came", "Galoreadamw", "Lamb", "Lars", "Muon", "Shampoo", "Sm3", "Soap"),
        "it steps by rows or by the norm of a weight, and DeepSpeed gives it one vector for many weights",
    ),
    "Adagrad": "DeepSpeed constructs another one, which has the first group's options and no schedule",
}
"""Classes that DeepSpeed 0.19 makes step otherwise than the weights one by one, and why."""


def check_optimizer(optimizer: Optimizer, strategy: str, refused: dict[str, str]) -> None:
    """Refuse an optimizer that would train other weights than on one device. Subclasses count as what they derive from.

    Raises:
        MisconfigurationException: If it is known to do so.
    """
    names = (kind.__name__.capitalize() for kind in type(optimizer).__mro__)
    because = next((refused[name] for name in names if name in refused), None)
    if because is not None:
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}` would give other weights than on one device under `strategy={strategy}`: "
            f"{because}. Train with `strategy=memfit_ddp`, or choose another optimizer."
        )
