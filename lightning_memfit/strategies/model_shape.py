"""The parameters of a module before it is built, which must be known before weights go to disk one by one."""

import copy
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo


@dataclass(frozen=True)
class ModelShape:
    """Parameters of a module, and how they are distributed over its submodules."""

    parameters: tuple[ParameterInfo, ...]
    numels_by_module: tuple[tuple[int, ...], ...]
    """Elements that each submodule owns itself and needs at the same time."""

    def most_per_module(self, min_numel: int) -> int:
        """Largest number of parameters of at least `min_numel` elements that one submodule owns."""
        return max((sum(numel >= min_numel for numel in numels) for numels in self.numels_by_module), default=0)

    @classmethod
    def of(cls, module: LightningModule) -> "ModelShape":
        """Build a copy on the meta device, without memory. The module and random state stay unchanged.

        What callbacks add to `configure_model` is left out, because adapters are small.

        Raises:
            MisconfigurationException: If the module can't be built this way.
        """
        from lightning_memfit.profile.fake import fake_pretrained_weights

        random_state, trainer = torch.get_rng_state(), getattr(module, "_trainer", None)
        try:
            clone = copy.deepcopy(module, {} if trainer is None else {id(trainer): None})
            with torch.device("meta"), fake_pretrained_weights():
                type(clone).configure_model(clone)
        except Exception as error:
            raise MisconfigurationException(
                f"{type(module).__name__}.configure_model can't be run without memory, to learn the parameters' shapes "
                f"({type(error).__name__}: {error}). Build the model in `__init__` instead."
            ) from error
        finally:
            torch.set_rng_state(random_state)
        owned = (tuple(p.numel() for p in child.parameters(recurse=False)) for child in clone.modules())
        return cls(parameter_table(clone), tuple(numels for numels in owned if numels))

    @classmethod
    def of_built(cls, module: torch.nn.Module) -> "ModelShape":
        """Read a module that is built, partitioned by ZeRO-3 or not."""
        owned = (tuple(whole_numel(p) for p in child.parameters(recurse=False)) for child in module.modules())
        table = (
            ParameterInfo(name, whole_numel(p), p.element_size(), p.requires_grad, len(_shape(p)), "", _shape(p))
            for name, p in module.named_parameters()
        )
        return cls(tuple(table), tuple(numels for numels in owned if numels))


def whole_numel(parameter: torch.nn.Parameter) -> int:
    """Elements of a parameter, those of one that ZeRO-3 has partitioned on all ranks."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
