"""Non-public parts of Lightning that FSDP2's checkpoints need, written for lightning 2.6."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies import model_parallel
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from lightning_memfit.profile.replaced import replaced
from lightning_memfit.strategies.upstream.torch import names_in_checkpoints


@contextmanager
def loading_into(module: nn.Module, rename: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """While Lightning loads a checkpoint, name weights and optimizer states otherwise than it does.

    Lightning 2.6 saves weights without the names that torch.compile puts in between, and doesn't find them again.

    Lightning 2.6 takes the numbers in them for places in the module, where they are places in the optimizer's groups.
    torch 2.13 fails ("Expected device to be set") for optimizers without a tensor that has dimensions, such as SGD
    without momentum: what these keep is no part of a parameter, and the optimizer itself loads it.

    Args:
        module: The one whose weights are loaded.
        rename: Returns an optimizer's state dict with names of parameters; called once per optimizer, in order.
    """

    def renamed(optimizer_state_dict: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        return _without_wrappers(rename(optimizer_state_dict))

    set_all = state_dict.set_optimizer_state_dict

    def set_states(
        module: nn.Module, optimizer: Optimizer, *, optim_state_dict: Any, options: StateDictOptions, **more: Any
    ) -> None:
        states = optim_state_dict["state"].values()
        is_divided = any(isinstance(value, Tensor) and value.dim() for state in states for value in state.values())
        if is_divided or not options.full_state_dict:
            set_all(module, optimizer, optim_state_dict=optim_state_dict, options=options, **more)
        else:
            optimizer.load_state_dict(_by_places(optim_state_dict, optimizer, names_in_checkpoints(module)))

    load_whole = model_parallel._load_raw_module_state

    def load_renamed(weights: dict[str, Any], module: nn.Module, *args: Any, **options: Any) -> None:
        load_whole(_named_as_in(module, weights), module, *args, **options)

    def before(owner: nn.Module, weights: dict[str, Any], *_: Any) -> None:
        found = _named_as_in(owner, weights)
        weights.clear()
        weights.update(found)

    handle = module.register_load_state_dict_pre_hook(before)
    try:
        with (
            replaced(model_parallel, "_rekey_optimizer_state_if_needed", renamed),
            replaced(model_parallel, "_load_raw_module_state", load_renamed),
            replaced(state_dict, "set_optimizer_state_dict", set_states),
        ):
            yield
    finally:
        handle.remove()


def _without_wrappers(saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with the names of checkpoints; Lightning saves one without states under its own."""

    def plain(name: str) -> str:
        return name.replace("_orig_mod.", "")

    groups = [group | {"params": list(map(plain, group["params"]))} for group in saved["param_groups"]]
    return {"state": {plain(name): state for name, state in saved["state"].items()}, "param_groups": groups}


def _named_as_in(module: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under a module's own names, where they have those of checkpoints."""
    names = names_in_checkpoints(module)
    own = {names[id(tensor)]: name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return {key if key in own.values() else own.get(key, key): value for key, value in weights.items()}


def _by_places(saved: dict[str, Any], optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """A state dict as `Optimizer.load_state_dict` takes it, from one with names of parameters.

    Args:
        saved: Its groups may be in another order.
        optimizer: The one that goes on.
        names: Names of its parameters by `id`.

    Raises:
        ValueError: If a group of the optimizer has other parameters than those that were saved.
    """
    options = {frozenset(group["params"]): group for group in saved["param_groups"]}
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for group in optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"]]
        if frozenset(own) not in options:
            raise ValueError(
                f"The checkpoint has no optimizer group of just {', '.join(sorted(own)[:3])}{' ...' * (len(own) > 3)}. "
                "Make the optimizer as the saved run did, or load the weights alone."
            )
        numbers |= {name: len(numbers) + place for place, name in enumerate(own)}
        groups.append(options[frozenset(own)] | {"params": [numbers[name] for name in own]})
    return {"state": {numbers[name]: state for name, state in saved["state"].items()}, "param_groups": groups}
