"""Non-public parts of Lightning that FSDP2's checkpoints need, written for lightning 2.6."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies import model_parallel
from torch import nn

from lightning_memfit.profile.replaced import replaced


@contextmanager
def naming_states_by(rename: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Name the optimizer states of a one-file checkpoint otherwise than Lightning does while it loads one.

    Lightning 2.6 takes the numbers in them for places in the module, where they are places in the optimizer's groups.

    Args:
        rename: Returns an optimizer's state dict with names of parameters; called once per optimizer, in order.
    """

    def renamed(optimizer_state_dict: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        return rename(optimizer_state_dict)

    with replaced(model_parallel, "_rekey_optimizer_state_if_needed", renamed):
        yield
