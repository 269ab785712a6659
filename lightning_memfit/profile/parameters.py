"""The parameter table of a profile."""

import torch

from lightning_memfit.profile.record import ParameterInfo


def parameter_table(module: torch.nn.Module) -> tuple[ParameterInfo, ...]:
    """Every parameter with its stored size; tied ones name the first."""
    first_name: dict[int, str] = {}
    table = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared = first_name.get(id(parameter), "")
        first_name.setdefault(id(parameter), name)
        size = parameter.element_size()
        shape = tuple(parameter.shape)
        info = ParameterInfo(name, parameter.numel(), size, parameter.requires_grad, len(shape), shared, shape)
        table.append(info)
    return tuple(table)
