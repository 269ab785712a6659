"""Find the linear layers of a module that can get adapters or be quantized, and say why others can't."""

import difflib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Linear  # the class itself, which precisions of Lightning replace in `torch.nn` for a while
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memfit.adapters.layer import FrozenLinear, is_conv1d

AUTO = "auto"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; a subclass is not, as it may compute something else."""
    return type(module) is Linear or is_conv1d(module) or isinstance(module, FrozenLinear)


def weight_of(module: nn.Module) -> Tensor | None:
    """The registered weight of a layer, or the one that waits for a quantized layer."""
    return module.raw if isinstance(module, FrozenLinear) else module._parameters.get("weight")


def linear_layers(
    module: nn.Module, names: str | Collection[str] = AUTO, shared: bool = True
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Linear layers by dotted name, and those that `auto` leaves out with the reason.

    A layer that is in several places has the first name.

    Args:
        module: Any module.
        names: `auto` for all but output heads; else last parts of dotted names such as `c_attn` or `self_attn.q_proj`.
        shared: Whether linear layers may have a weight in common, if all of them are chosen.

    Raises:
        ValueError: If the module has no such layer, a name fits none, or a layer that is named can't be changed.
    """
    places: dict[int, list[str]] = {}
    inside = {id(part) for child in module.modules() if isinstance(child, FrozenLinear) for part in child.modules()}
    for name, child in module.named_modules(remove_duplicate=False):
        if name and is_linear(child) and (isinstance(child, FrozenLinear) or id(child) not in inside):
            places.setdefault(id(child), []).append(name)
    found = {names[0]: module.get_submodule(names[0]) for names in places.values()}
    if names == AUTO:
        heads = output_heads(module)
        chosen = {name: child for name, child in found.items() if id(child) not in heads}
        left_out = _unfit(module, chosen, shared)
        chosen = {name: child for name, child in chosen.items() if name not in left_out}
        if not chosen:
            reasons = "".join(f" {name}: {reason}." for name, reason in list(left_out.items())[:3])
            kinds = sorted({type(c).__name__ for c in module.modules() if isinstance(c, Linear) and not is_linear(c)})
            others = f" {', '.join(kinds)} may compute something else than nn.Linear." if kinds else ""
            raise ValueError(
                f"{type(module).__name__} has no linear layer (nn.Linear or Conv1D) besides its heads.{others}{reasons}"
            )
        return chosen, left_out
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if not any(_fits(full, name) for full_names in places.values() for full in full_names):
            raise ValueError(_not_found(module, name, found))
    chosen = {
        first: child
        for first, child in found.items()
        if any(_fits(full, name) for full in places[id(child)] for name in wanted)
    }
    for name, reason in _unfit(module, chosen, shared).items():
        raise ValueError(f"{name}: {reason}. Leave it out of `target_modules`.")
    return chosen, {}


def _not_found(module: nn.Module, name: str, found: Collection[str]) -> str:
    others = [full for full, _ in module.named_modules() if full and _fits(full, name)]
    if others:
        kind = type(module.get_submodule(others[0])).__name__
        return (
            f"{name!r} fits {others[0]} of {type(module).__name__}, a {kind}: only nn.Linear and Conv1D themselves are "
            "changed, as a subclass may compute something else. Leave it out of `target_modules`."
        )
    known = sorted({full.rpartition(".")[2] for full in found})
    closest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    return (
        f"{name!r} is the end of no linear layer's name in {type(module).__name__}. Closest: "
        f"{', '.join(closest) or 'none'}."
    )


def _fits(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _unfit(module: nn.Module, chosen: dict[str, nn.Module], shared: bool) -> dict[str, str]:
    """The chosen layers that can't be changed without changing what others compute, with the reason."""
    ids = {id(child) for child in chosen.values()}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    memory: dict[int, dict[int, Tensor]] = {}
    for name, owner, tensor in _registered(module):
        owners.setdefault(id(tensor), []).append((name, owner))
        memory.setdefault(_storage(tensor), {})[id(tensor)] = tensor
    reasons = {}
    for name, layer in chosen.items():
        weight = weight_of(layer)
        if not isinstance(weight, nn.Parameter):
            reasons[name] = "its weight is computed from other parameters (weight_norm, spectral_norm)"
        elif "forward" in vars(layer):
            reasons[name] = "its `forward` was replaced before (if by a technique, list that one later)"
        elif weight.numel() == 0:
            reasons[name] = f"its weight of shape {tuple(weight.shape)} is empty"
        elif weight.ndim != 2 or not weight.is_floating_point():
            reasons[name] = f"its weight is {weight.ndim}-dimensional, of {weight.dtype}"
        elif is_traceable_wrapper_subclass(weight) or weight.layout is not torch.strided:
            reasons[name] = f"its weight is a {type(weight.data).__name__} of layout {weight.layout}, no plain tensor"
        else:
            together = owners.get(id(weight), [])
            others = [owner for _, owner in together if owner is not layer]
            fits = shared and all(id(o) in ids and is_conv1d(o) == is_conv1d(layer) for o in others)
            if others and not fits:
                names = " = ".join(full for full, _ in together)
                reasons[name] = f"{names} is one weight of several layers and can't be changed for one of them"
            elif any(_overlap(weight, other) for other in memory.get(_storage(weight), {}).values()):
                reasons[name] = "its weight has its memory in common with another parameter or buffer"
    return reasons


def _registered(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every parameter and buffer with its owner, also where it is a second time, by one name for each owner."""
    for prefix, owner in module.named_modules():
        for part in (owner._parameters, owner._buffers):
            for name, tensor in part.items():
                if tensor is not None and not isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                    yield (f"{prefix}.{name}" if prefix else name), owner, tensor


def _storage(tensor: Tensor) -> int:
    """Id of the memory; that of a tensor without a storage of its own, or without values, is the tensor's."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # subclasses that wrap other tensors
        return id(tensor)


def _overlap(weight: Tensor, other: Tensor) -> bool:
    """Whether another tensor of the same storage lies where a weight does."""
    if other is weight:
        return False
    (start, end), (first, last) = _span(weight), _span(other)
    return start < last and first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    reach = 1 + sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + reach * tensor.itemsize


def output_heads(module: nn.Module) -> set[int]:
    """Ids of the layers that make a model's outputs: those named by Hugging Face models, and those tied to embeddings.

    A linear layer after the last repeated block is not a head for that reason alone: adapters work there, too.
    """
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    heads = {id(child) for child in module.modules() if is_linear(child) and id(weight_of(child)) in embeddings}
    for child in module.modules():
        if any(
            cls.__name__ == "PreTrainedModel" for cls in type(child).__mro__
        ):  # others may mean something else by it
            heads.add(id(child.get_output_embeddings()))  # type: ignore[operator]
    return heads
