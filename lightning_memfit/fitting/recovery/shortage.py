"""`Shortage`: what follows when memory runs out: a smaller micro-batch, recomputation, or an error."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_memfit.checkpointing.apply import (
    CheckpointedForward,
    apply_checkpointing,
    disable_caches,
    is_checkpointed,
)
from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.fitting.recovery.oom_report import explain
from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.reliability.consensus import RankConsensus

if TYPE_CHECKING:
    from lightning_memfit.fitting.step.loop import Fitting, StepRequest

_NOT_TOGETHER = (
    "Memory ran out on this rank, which communicates with others inside the step: to stop and repeat it together takes "
    "FSDP2 (`memfit_fsdp2`) and torch 2.13."
)
_NOT_REPEATED = (
    "Memory ran out in a step under ZeRO, which can't be repeated: DeepSpeed has reduced a part of its gradients."
)
_RESUME = (
    "Resume from the last checkpoint with `MicroBatching(micro_batch_size={})`, which should fit where {} didn't; the "
    "effective batch stays the same."
)
_HINT = "`MicroBatching(last_resort='recompute')` recomputes activations before it gives up."
_NOTHING_SMALLER = (
    "It was one sample at a time: resume from the last checkpoint with `ActivationCheckpointing`, shorter samples, or "
    "a strategy that keeps less on the device."
)


class Shortage:
    """Lowers what a step needs, on all ranks alike, and says why if nothing is left."""

    def __init__(self, fitting: "Fitting") -> None:
        self._fitting = fitting
        is_allowed = fitting.options.last_resort == "recompute"
        self.recomputation = Recomputation(fitting.loop.module, is_allowed, fitting.consensus)
        self._hint = "" if is_allowed else _HINT

    def need_less(self, request: "StepRequest", size: int, message: str, error: Exception | None) -> None:
        """Lower the micro-batch after `size` failed, or recompute if it is one sample.

        Raises:
            torch.OutOfMemoryError: If nothing is left.
        """
        fitting = self._fitting
        smaller = fitting.sizes.shrink(size)
        done = None if smaller else self.recomputation.start()
        if smaller:
            rank_zero_warn(f"Memory ran out with micro-batch {size}: the effective batch is repeated with {smaller}.")
            fitting.note(smaller, message)
        elif done:
            rank_zero_warn(f"Memory ran out with one sample: the effective batch is repeated, from now on with {done}.")
            fitting.note(fitting.sizes.current, f"from now on with {done}")
        else:
            is_whole = fitting.splitter.count(request.batch) == 1
            what = "A batch of one sample, which is never cut," if is_whole else "A micro-batch of one sample"
            raise MemoryExhausted(
                f"{what} does not fit{self.recomputation.summary()} {message}\n{self._explain(request)}"
            ) from error

    def ending(self, request: "StepRequest", size: int, error: Exception) -> MemoryExhausted:
        """Say why a batch can't be repeated, and with which size `fit` can go on from the last checkpoint."""
        fitting = self._fitting
        why = _NOT_REPEATED if fitting.loop.engine is not None else _NOT_TOGETHER
        smaller = fitting.sizes.shrink(size)
        if smaller and fitting.shapes is not None:
            smaller = fitting.shapes.size_for(request.batch, smaller)
        fix = _RESUME.format(smaller, size) if smaller else _NOTHING_SMALLER
        return MemoryExhausted(f"{why} {fix} {str(error).splitlines()[0]}")

    def _explain(self, request: "StepRequest") -> str:
        """Run one sample once more and return what fills the memory."""
        loop, hook_name = self._fitting.loop, self._fitting.loop.module._current_fx_name
        part = self._fitting.splitter.first(request.batch, 1)

        def run() -> None:
            if loop.is_sharded:
                return  # ranks would have to communicate
            loss = loop.forward(request, part, 1.0).closure_loss
            if loss is not None:
                loop.backward(request, loss, announce=False)

        text = explain(loop.trainer, run, self._hint)
        loop.module._current_fx_name = hook_name  # Lightning doesn't reset it when a hook raises
        return text


class Recomputation:
    """Recompute every repeated block of a module in backward, on all ranks together.

    Gradients, random numbers and updates stay bitwise what they are. Blocks that keep some of their activations
    (`ActivationCheckpointing` with `selective` or `choices`) keep none from then on. Compiled blocks, those with
    Hugging Face's own checkpointing and those whose activations are offloaded stay as they are.
    """

    def __init__(self, module: nn.Module, is_allowed: bool, consensus: RankConsensus) -> None:
        self._module = module
        self._is_allowed = is_allowed
        self._consensus = consensus
        self._done = ""
        self._undo: list[Callable[[], None]] = []

    def start(self) -> str | None:
        """Start it and return what it did; None if nothing is left to do."""
        if not self._is_allowed or self._done:
            return None
        plain: list[nn.Module] = []
        kept_in_part: list[CheckpointedForward] = []
        for block in (module for group in find_blocks(self._module) for module in group.modules):
            forward = vars(block).get("forward")
            if isinstance(forward, CheckpointedForward) and forward.choice not in ("full", "offload_inputs"):
                kept_in_part.append(forward)
            elif not (is_checkpointed(block) or _is_compiled(block)):
                plain.append(block)
        num_blocks = len(plain) + len(kept_in_part)
        if not self._consensus.any_of([num_blocks > 0])[0]:
            return None
        self._undo.append(disable_caches(self._module))
        self._undo += [partial(setattr, one, "choice", one.choice) for one in kept_in_part]
        self._undo.append(apply_checkpointing(plain, ["full"] * len(plain)).remove)
        for forward in kept_in_part:
            forward.choice = "full"
        self._done = f"the activations of {num_blocks} more blocks recomputed in backward"
        return self._done

    def summary(self) -> str:
        """Describe what was done, or why it could not be, for the error when that was not enough."""
        if self._done:
            return f" even with {self._done}."
        return ". No recomputation: there is no repeated block that keeps activations." if self._is_allowed else "."

    def close(self) -> None:
        """Make blocks keep what they kept before."""
        while self._undo:
            self._undo.pop()()
        self._done = ""


def _is_compiled(block: nn.Module) -> bool:
    return any(getattr(child, "_compiled_call_impl", None) is not None for child in block.modules())
