"""Non-public parts of Lightning that FSDP2's checkpoints need, written for lightning 2.6."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies import model_parallel
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.optim import Optimizer

from lightning_memfit.profile.replaced import replaced


@contextmanager
def naming_states_by(rename: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Name the optimizer states of a one-file checkpoint otherwise than Lightning does while it loads one.

    Lightning 2.6 takes the numbers in them for places in the module, where they are places in the optimizer's groups.
    torch 2.13 fails ("Expected device to be set") for optimizers that keep no tensors, such as SGD without momentum:
    their groups are all there is to load.

    Args:
        rename: Returns an optimizer's state dict with names of parameters; called once per optimizer, in order.
    """

    def renamed(optimizer_state_dict: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        return rename(optimizer_state_dict)

    set_all = state_dict.set_optimizer_state_dict

    def set_states(module: nn.Module, optimizer: Optimizer, *, optim_state_dict: Any, **options: Any) -> None:
        states = optim_state_dict["state"].values()
        if any(isinstance(value, Tensor) and value.dim() for state in states for value in state.values()):
            set_all(module, optimizer, optim_state_dict=optim_state_dict, **options)
        else:
            _set_groups(module, optimizer, optim_state_dict["param_groups"])

    named = replaced(model_parallel, "_rekey_optimizer_state_if_needed", renamed)
    with named, replaced(state_dict, "set_optimizer_state_dict", set_states):
        yield


def _set_groups(module: nn.Module, optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Set the options of groups to those that were saved for the same parameters, by name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    options = {frozenset(group["params"]): group for group in saved}
    for group in optimizer.param_groups:
        own = frozenset(names[id(parameter)] for parameter in group["params"])
        if own not in options:
            raise ValueError(
                f"The checkpoint has no optimizer group of just {', '.join(sorted(own)[:3])}{' ...' * (len(own) > 3)}. "
                "Make the optimizer as the saved run did, or load the weights alone."
            )
        group.update({name: value for name, value in options[own].items() if name != "params"})
