"""The parameters of a module before it is built, which must be known before weights go to disk one by one."""

import copy

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.parameters import ParameterInfo


def parameters_once_built(module: LightningModule) -> tuple[ParameterInfo, ...]:
    """Build a copy on the meta device, without memory, and read its parameters. Module and random state stay unchanged.

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
    return parameter_table(clone)
