"""Every technique. To add one to this package, write a file with its record and a line here; others use `register`."""

from collections import ChainMap
from collections.abc import Callable
from difflib import get_close_matches

from lightning_memfit.estimate.division import Division
from lightning_memfit.optim.optimizers import OPTIMIZERS, OptimizerRecord
from lightning_memfit.techniques import (
    activation_checkpointing,
    attention,
    bf16_stochastic_rounding,
    chunked_loss,
    data_loading,
    gradient_release,
    host_master_weights,
    lora,
    micro_batching,
    mixed_precision,
    optimizer,
    optimizer_8bit,
    strategies,
    tf32,
    tiled_mlp,
    torch_compile,
    zero_grad_after_step,
)
from lightning_memfit.techniques.core.sharding import Sharding
from lightning_memfit.techniques.core.technique import Technique

TECHNIQUES: tuple[Technique, ...] = (
    lora.LORA,
    lora.QLORA,
    lora.LORA_8BIT,
    optimizer_8bit.OPTIMIZER_8BIT,
    optimizer_8bit.PAGED_OPTIMIZER,
    optimizer_8bit.PAGED_OPTIMIZER_8BIT,
    *optimizer.TECHNIQUES,
    mixed_precision.BF16_MIXED,
    mixed_precision.FP16_MIXED,
    mixed_precision.BF16_TRUE,
    bf16_stochastic_rounding.TECHNIQUE,
    host_master_weights.TECHNIQUE,
    gradient_release.TECHNIQUE,
    zero_grad_after_step.TECHNIQUE,
    chunked_loss.TECHNIQUE,
    tiled_mlp.TECHNIQUE,
    activation_checkpointing.TECHNIQUE,
    attention.TECHNIQUE,
    torch_compile.TECHNIQUE,
    tf32.TECHNIQUE,
    data_loading.TECHNIQUE,
    micro_batching.TECHNIQUE,
)
"""Techniques of this package; `techniques` also has those of `register`."""

STRATEGIES: tuple[Technique, ...] = strategies.STRATEGIES
"""Every strategy. They are techniques of one kind, kept apart because none is a callback that a trace would show."""

_KNOWN = {technique.name: technique for technique in TECHNIQUES}
_BY_NAME = ChainMap(strategies.KNOWN, _KNOWN)


def techniques() -> tuple[Technique, ...]:
    """Every technique except strategies, registered ones last."""
    return tuple(_KNOWN.values())


def all_strategies() -> tuple[Technique, ...]:
    """Every strategy, registered ones last."""
    return tuple(strategies.KNOWN.values())


def strategy_of(division: Division) -> Technique | None:
    """The strategy that divides a run and offloads its parts the same, by which plans know it; None if none does."""
    return next((one for one in all_strategies() if one.sharding == Sharding.of(division)), None)


def find_technique(name: str) -> Technique:
    """Look up a technique or a strategy.

    Raises:
        ValueError: If none has that name; the message lists the closest names.
    """
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    names = list(_BY_NAME)
    closest = get_close_matches(name, names, n=3, cutoff=0.5) or names
    raise ValueError(f"`technique={name!r}` is not known. Closest: {', '.join(closest)}.")


def register(technique: Technique) -> Callable[[], None]:
    """Make your own technique or strategy known in this process to settings, plans and estimates.

    Returns:
        A function that removes it again.

    Raises:
        ValueError: If one of that name exists already, or a strategy doesn't say how it shards.
    """
    if technique.name in _BY_NAME:
        raise ValueError(f"`name={technique.name!r}`: there is such a technique already. Choose another name.")
    if technique.kind == "strategy" and technique.sharding is None:
        raise ValueError(f"`sharding` of {technique.name} is None, but a strategy must say what it divides.")
    known = strategies.KNOWN if technique.kind == "strategy" else _KNOWN
    known[technique.name] = technique

    def take_off() -> None:
        known.pop(technique.name, None)

    return take_off


def register_optimizer(record: OptimizerRecord) -> Callable[[], None]:
    """Make your own optimizer known in this process, with its technique if it has a `replacement`.

    Returns:
        A function that removes both again.

    Raises:
        ValueError: If an optimizer or a technique of its name exists already.
    """
    if record.name in OPTIMIZERS:
        raise ValueError(f"`name={record.name!r}`: there is such an optimizer already. Choose another name.")
    technique_off = register(optimizer.technique_of(record)) if record.replacement is not None else None
    OPTIMIZERS[record.name] = record

    def take_off() -> None:
        OPTIMIZERS.pop(record.name, None)
        if technique_off is not None:
            technique_off()

    return take_off
