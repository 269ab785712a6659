"""The parameter table of a profile."""

import torch

from lightning_memfit.profile.record import ParameterInfo


def parameter_table(module: torch.nn.Module, dtype: torch.dtype | None = None) -> tuple[ParameterInfo, ...]:
    """Every parameter with its stored size; tied ones name the first.

    Args:
        module: Not changed.
        dtype: Count floating parameters as after `module.to(dtype)`.
    """
    first_name: dict[int, str] = {}
    table = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared = first_name.get(id(parameter), "")
        first_name.setdefault(id(parameter), name)
        size = dtype.itemsize if dtype and parameter.is_floating_point() else parameter.element_size()
        shape = tuple(parameter.shape)
        info = ParameterInfo(name, parameter.numel(), size, parameter.requires_grad, len(shape), shared, shape)
        table.append(info)
    return tuple(table)
