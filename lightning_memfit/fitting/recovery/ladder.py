"""`Ladder`: what is done step by step when not even one sample fits, and undone when it is no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Protocol, get_args

from torch import nn
from torch.optim import Optimizer

from lightning_memfit.checkpointing.apply import (
    AppliedCheckpointing,
    CheckpointedForward,
    apply_checkpointing,
    disable_caches,
    is_checkpointed,
)
from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.checkpointing.offload import OffloadPool
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.device.host import probe_host
from lightning_memfit.fitting.recovery.host_states import HostStates, reason_to_stay
from lightning_memfit.fitting.size.sizes import Backoff
from lightning_memfit.memory import format_bytes
from lightning_memfit.reliability.consensus import RankConsensus


class Rung(Protocol):
    """One way to make a sample need less memory and more time, put into effect in the middle of training.

    Gradients, random numbers and updates stay bitwise what they are.

    Attributes:
        name: Name of the rung, for messages.
    """

    name: str

    @property
    def description(self) -> str:
        """Describe what it did, in words that follow "with"."""

    def refusal(self) -> str | None:
        """Return why it can do nothing now, or None if it can."""

    def apply(self) -> None:
        """Put it into effect; call this only if `refusal` returns None."""

    def remove(self) -> None:
        """Undo it. It is safe to call this at any time."""


class Ladder:
    """Rungs in the order in which they are tried; all ranks climb together.

    After a quiet spell the rung taken last is given up, for whatever made it necessary may have passed: another
    process, an exceptionally long batch. What doing without it needs can't be measured beforehand, so it is tried; a
    failure within the next quiet spell takes the rung again, and doubles the spell. The batch that fails is repeated
    exactly.

    Args:
        rungs: All rungs that are available.
        consensus: Communication between the ranks. A rung is taken if it helps on any of them.
    """

    def __init__(self, rungs: Iterable[Rung], consensus: RankConsensus) -> None:
        self._left = list(rungs)
        self._consensus = consensus
        self._taken: list[Rung] = []
        self._backoff = Backoff()
        self._is_trying_without = False

    def climb(self) -> str | None:
        """Take the next rung that helps and return what it did; None if none is left."""
        self._backoff.restart()
        return next((rung.description for rung in list(self._left) if self._take(rung)), None)

    def climb_again(self) -> str | None:
        """After a failure, take again the rung that was given up last; return None if there is none."""
        if not self._is_trying_without:
            self._backoff.restart()
            return None
        self._backoff.fail()
        self._is_trying_without = False
        return next((rung.description for rung in self._left[:1] if self._take(rung)), None)

    def succeed(self) -> str | None:
        """Count a batch without failure; if it is time, give up the rung that was taken last, and return which."""
        if not (self._taken or self._is_trying_without) or not self._backoff.succeed():
            return None
        self._is_trying_without = bool(self._taken)
        if not self._taken:
            return None
        rung = self._taken.pop()
        description = rung.description
        rung.remove()
        self._left.insert(0, rung)
        return description

    def summary(self) -> str:
        """Describe what was done and why no more could be done, for the error when that was not enough."""
        done = "".join(f" with {rung.description}," for rung in self._taken)
        not_done = "".join(f" No {rung.name}: {rung.refusal()}." for rung in self._left)
        return f"{f' even{done[:-1]}' if done else ''}.{not_done}"

    def close(self) -> None:
        """Undo everything, the latest first."""
        while self._taken:
            self._taken.pop().remove()

    def _take(self, rung: Rung) -> bool:
        helps = rung.refusal() is None
        if not self._consensus.any_of([helps])[0]:
            return False
        if helps:
            rung.apply()
        self._left.remove(rung)
        self._taken.append(rung)
        return True


# --- the rungs: recomputation, then block inputs and optimizer states in host memory --------------------------------

LastResort = Literal["none", "recompute", "offload"]
"""How far the ladder goes: no rung, recomputation, or host memory as well."""

LAST_RESORTS: tuple[LastResort, ...] = get_args(LastResort)

_HOST_SHARE = 0.9  # share of the free memory; the rest is for copies of the batch and for other processes


class Recomputation:
    """Recompute every repeated block of a module in backward.

    Blocks that keep some of their activations (`ActivationCheckpointing` with `selective` or `choices`) keep none from
    then on. Compiled blocks, those with Hugging Face's own checkpointing and those whose activations are offloaded
    stay as they are.

    Args:
        module: The module in training.
    """

    name = "recomputation"

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._applied: AppliedCheckpointing | None = None
        self._before: list[tuple[CheckpointedForward, Choice]] = []
        self._enable_caches: Callable[[], None] | None = None
        self._num_blocks = 0

    @property
    def description(self) -> str:
        """Describe how many blocks were changed."""
        return f"the activations of {self._num_blocks} more blocks recomputed in backward"

    def refusal(self) -> str | None:
        """Return None if a block keeps activations."""
        plain, partial = self._blocks()
        return None if plain or partial else "there is no repeated block that keeps activations"

    def apply(self) -> None:
        """Change the blocks."""
        plain, partial = self._blocks()
        self._enable_caches = disable_caches(self._module)
        self._applied = apply_checkpointing(plain, ["full"] * len(plain))
        self._before = [(forward, forward.choice) for forward in partial]
        for forward in partial:
            forward.choice = "full"
        self._num_blocks = len(plain) + len(partial)

    def remove(self) -> None:
        """Make blocks keep what they kept before."""
        if self._applied is not None:
            self._applied.remove()
        for forward, choice in self._before:
            forward.choice = choice
        if self._enable_caches is not None:
            self._enable_caches()
        self._applied, self._before, self._enable_caches = None, [], None

    def _blocks(self) -> tuple[list[nn.Module], list[CheckpointedForward]]:
        """Return the blocks that keep everything, and the forwards of those that keep a part."""
        plain: list[nn.Module] = []
        partial: list[CheckpointedForward] = []
        for block in (module for group in find_blocks(self._module) for module in group.modules):
            forward = vars(block).get("forward")
            if isinstance(forward, CheckpointedForward) and forward.choice != "full":
                partial.append(forward)
            elif not (is_checkpointed(block) or _is_compiled(block)):
                plain.append(block)
        return plain, partial


class InputsOnHost:
    """Keep the inputs of recomputed blocks in host memory until backward.

    Args:
        module: The module in training.
        has_host: Whether host memory is separate from the device's.
    """

    name = "offloading of block inputs"

    def __init__(self, module: nn.Module, has_host: bool) -> None:
        self._module = module
        self._has_host = has_host
        self._moved: list[CheckpointedForward] = []

    @property
    def description(self) -> str:
        """Describe how many blocks were changed."""
        return f"the inputs of {len(self._moved)} recomputed blocks in host memory"

    def refusal(self) -> str | None:
        """Return None if a block is recomputed from inputs on the device."""
        if not self._has_host:
            return _NO_HOST
        return None if any(self._on_device()) else "no block is recomputed from inputs on the device"

    def apply(self) -> None:
        """Change the blocks; they share one pool, so that each knows which ran before it."""
        pool = OffloadPool()
        self._moved = list(self._on_device())
        for forward in self._moved:
            forward.inputs_on_host = pool

    def remove(self) -> None:
        """Keep inputs on the device."""
        for forward in self._moved:
            forward.inputs_on_host = None
        self._moved = []

    def _on_device(self) -> Iterator[CheckpointedForward]:
        for block in self._module.modules():
            forward = vars(block).get("forward")
            if isinstance(forward, CheckpointedForward) and forward.inputs_on_host is None and not _is_compiled(block):
                yield forward


class StatesOnHost:
    """Keep optimizer states on the device only during the optimizer's step.

    Args:
        optimizer: The optimizer in training.
        has_host: Whether host memory is separate from the device's.
        num_sharing: Processes on this machine that share its memory.
    """

    name = "offloading of optimizer states"

    def __init__(self, optimizer: Optimizer, has_host: bool, num_sharing: int) -> None:
        self._optimizer = optimizer
        self._has_host = has_host
        self._num_sharing = num_sharing
        self._states: HostStates | None = None

    @property
    def description(self) -> str:
        """Describe how much was moved."""
        size = "" if self._states is None else f" ({format_bytes(self._states.size_bytes)})"
        return f"optimizer states in host memory between steps{size}"

    def refusal(self) -> str | None:
        """Return None if states can be moved and there is room for them."""
        return reason_to_stay(self._optimizer, self._free_bytes()) if self._has_host else _NO_HOST

    def apply(self) -> None:
        """Send the states, now and after each step."""
        self._states = HostStates(self._optimizer, self._free_bytes())

    def remove(self) -> None:
        """Make the states stay on the device."""
        if self._states is not None:
            self._states.stop()
        self._states = None

    def _free_bytes(self) -> int:
        return round(_HOST_SHARE * probe_host().available_bytes / self._num_sharing)


_NO_HOST = "host memory is the device's own, or none that this can use"


def rungs_up_to(
    last_resort: LastResort, module: nn.Module, optimizer: Optimizer, has_host: bool, num_sharing: int
) -> list[Rung]:
    """Return the rungs of a run, in order of their cost.

    Args:
        last_resort: How far to go.
        module: The module in training.
        optimizer: Its optimizer.
        has_host: Whether host memory is separate from the device's.
        num_sharing: Processes on this machine that share its memory.
    """
    rungs: list[Rung] = [
        Recomputation(module),
        InputsOnHost(module, has_host),
        StatesOnHost(optimizer, has_host, num_sharing),
    ]
    return rungs[: {"none": 0, "recompute": 1, "offload": len(rungs)}[last_resort]]


def _is_compiled(block: nn.Module) -> bool:
    return any(getattr(child, "_compiled_call_impl", None) is not None for child in block.modules())
