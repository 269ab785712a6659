"""Whether an optimizer steps parts of weights, or many in one vector, as it steps whole ones: found out by trying."""

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_memfit.strategies.launched import is_traced

_STEPS = 2
_Shapes = tuple[tuple[int, ...], ...]
_SHAPES: tuple[_Shapes, ...] = (((5, 3), (4,)), ((5, 3), (2, 3)))
"""Of the weights that are tried: a matrix that an even number of ranks can't divide, and a vector, or only matrices."""


def check_flat(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that steps a vector of many weights otherwise than the weights one by one.

    DeepSpeed gives optimizers flat vectors, in which the rows of a matrix (Adafactor, Muon) and the norm of one weight
    (LAMB) are lost. It is tried on two small weights.

    Args:
        optimizer: The module's own, with its groups.
        strategy: Name of the strategy.

    Raises:
        MisconfigurationException: If the results differ.
    """

    def flatten(weights: list[Tensor]) -> list[Tensor]:
        return [torch.cat([weight.flatten() for weight in weights])]

    def parts(vectors: list[Tensor], shapes: _Shapes) -> list[Tensor]:
        split = vectors[0].split([math.prod(shape) for shape in shapes])
        return [one.view(shape) for one, shape in zip(split, shapes, strict=True)]

    _compare(optimizer, flatten, parts, strategy, "DeepSpeed gives it one vector for many weights")


def check_divided(optimizer: Optimizer, divide: Callable[[Tensor], Tensor], strategy: str) -> None:
    """Refuse an optimizer that steps parts of weights otherwise than whole ones, or not at all.

    Args:
        optimizer: The module's own, with its groups.
        divide: Makes a weight one that is divided among ranks, as the strategy's are.
        strategy: Name of the strategy.

    Raises:
        MisconfigurationException: If the results differ.
    """
    if is_traced():  # the run itself compares values
        return

    def whole(weights: list[Any], shapes: _Shapes) -> list[Tensor]:
        return [weight.full_tensor() for weight in weights]

    _compare(optimizer, lambda weights: list(map(divide, weights)), whole, strategy, "a rank has parts of weights")


def _compare(
    optimizer: Optimizer,
    change: Callable[[list[Tensor]], list[Tensor]],
    restore: Callable[[list[Tensor], _Shapes], list[Tensor]],
    strategy: str,
    because: str,
) -> None:
    if type(optimizer).__module__.startswith(_KNOWN):
        return
    name = type(optimizer).__name__
    advice = f"{because} under `strategy={strategy}`. Train with `strategy=memfit_ddp`, or choose another optimizer."
    for group in optimizer.param_groups:
        tried = _first_tried(optimizer, group)
        if tried is None:  # it needs more than weights and gradients, and is not known here
            return
        shapes, options, start, gradients, expected = tried
        try:
            found = restore(_stepped(optimizer, options, change(start), list(map(change, gradients))), shapes)
        except Exception as error:
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise MisconfigurationException(f"`{name}` can't step here ({cause}): {advice}") from error
        update = max(float((one - before).abs().max()) for one, before in zip(expected, start, strict=True))
        error_of = max(float((one.cpu() - other).abs().max()) for one, other in zip(found, expected, strict=True))
        if not error_of <= _TOLERANCE * update:
            raise MisconfigurationException(f"`{name}` would give other weights than on one device: {advice}")


def _first_tried(
    optimizer: Optimizer, group: dict[str, Any]
) -> tuple[_Shapes, dict[str, Any], list[Tensor], list[list[Tensor]], list[Tensor]] | None:
    """Shapes and options that an optimizer takes, weights, gradients of some steps, and the weights after these."""
    options = {key: value for key, value in group.items() if key in optimizer.defaults and key not in _NOT_TAKEN}
    for shapes, own in itertools.product(_SHAPES, ({"lr": 0.1}, {})):  # a schedule may begin with a rate of zero
        start, gradients = _numbers(0, shapes), [_numbers(1 + step, shapes) for step in range(_STEPS)]
        with suppress(Exception):
            return shapes, options | own, start, gradients, _stepped(optimizer, options | own, start, gradients)
    return None


def _numbers(seed: int, shapes: _Shapes) -> list[Tensor]:
    """The same on every rank, without a random generator of the run."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]


def _stepped(
    optimizer: Optimizer, options: dict[str, Any], weights: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    """Weights after steps of a new optimizer of another's class."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    new: Any = type(optimizer)
    stepping = new(parameters, **options)
    for gradient in gradients:
        for parameter, one in zip(parameters, gradient, strict=True):
            parameter.grad = one.clone()
        stepping.step(lambda: torch.zeros(()))
    return [parameter.detach() for parameter in parameters]


_NOT_TAKEN = {"capturable", "differentiable", "decoupled_weight_decay", "foreach", "fused"}
"""Options of how torch's optimizers step, not what."""

_KNOWN = ("bitsandbytes.", "deepspeed.", "lightning_memfit.", "torchao.")
"""Whose optimizers are held against one device in the tests, or refused by their own rules."""

_TOLERANCE = 0.02
"""Largest difference in parts of the largest update. What is computed in bf16 differs by half a percent."""
