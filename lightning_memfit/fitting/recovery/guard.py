"""Recover from an out-of-memory error inside the first `optimizer.step`, which makes the optimizer's states.

A step changes weights and states tensor by tensor. When it fails midway, repeating it would apply the first part twice.
So weights are copied to host memory before the first step of an optimizer, and put back before it is repeated. Later
steps are the optimizer's own: one that fails midway ends the run.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.recovery.rollback import OptimizerSnapshot
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.memory.wrapping import own_attribute

_MAX_RETRIES = 3
_NOTHING: AbstractContextManager[None] = nullcontext()
_SMALLER = "Smaller states need less: `Optimizer8bit()` or `ReplaceOptimizer('torch.Adafactor')`."


class StepGuard:
    """Makes the first step of an optimizer repeatable.

    The retry runs with `foreach=False` and an emptied cache, so that it needs the temporaries of one tensor only.

    Attributes:
        num_retries: Number of steps repeated so far.
    """

    def __init__(self) -> None:
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self.num_retries = 0

    def __call__(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Guard the steps of an optimizer within the context."""
        return _NOTHING if optimizer in self._stepped else self._guarded(optimizer)

    @contextmanager
    def _guarded(self, optimizer: Any) -> Iterator[None]:
        own = own_attribute(optimizer, "step")
        optimizer.step = partial(self.step, optimizer, optimizer.step)
        try:
            yield
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own

    def step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run the first step with its closure, and repeat it if memory ran out in it.

        A gradient scaler runs the closure by itself, and calls the real step without one.

        Raises:
            MemoryExhausted: If memory runs out in every retry, or after the step had called its closure more than once;
                the message says whether weights are those before the step.
        """
        calls = _Calls(closure, optimizer)
        if closure is not None:
            kwargs["closure"] = calls
        for attempt in range(_MAX_RETRIES + 1):
            try:
                with _one_tensor_at_a_time(optimizer) if attempt else _NOTHING:
                    result = step(**kwargs)
            except Exception as error:
                failure = error
            else:
                self._stepped.add(optimizer)
                return result
            if calls.snapshot is not None:
                calls.snapshot.restore()
            if not is_out_of_memory(failure) or failure is calls.failure:
                raise failure
            if calls.number > 1 or not (calls.snapshot is not None or calls.is_untouched):
                raise MemoryExhausted(calls.explain(failure)) from failure
            release(failure)
            calls.number = 0
            if attempt < _MAX_RETRIES:
                self.num_retries += 1
                rank_zero_warn(
                    "Memory ran out in `optimizer.step`; the step is repeated tensor by tensor (`foreach=False`)."
                )
        raise MemoryExhausted(
            f"Memory ran out in `optimizer.step` {_MAX_RETRIES + 1} times in a row, at last with the temporaries of "
            f"one tensor only. Weights and states are those before the step. {_SMALLER} {str(failure).splitlines()[0]}"
        ) from failure


class _Calls:
    """The closure of a step. What its first call returns is kept for repetitions of the step, other calls compute.

    Args:
        closure: The closure; None if there is none, because it has been called.
        optimizer: The optimizer, whose weights and states are copied when the gradients are there.

    Attributes:
        number: How often the step has called it since it began.
        failure: The error that the last call ended in, if it did.
        snapshot: The copy; None if there is none.
    """

    def __init__(self, closure: Callable[[], Any] | None, optimizer: Optimizer) -> None:
        self._closure = closure
        self._optimizer = optimizer
        self._num_writes = _num_writes(optimizer)
        self._is_known = False
        self._loss: Any = None
        self.number = 0
        self.failure: BaseException | None = None
        self.snapshot = _copied(optimizer) if closure is None else None

    def __call__(self) -> Any:
        """Run forward and backward, and return the loss."""
        self.number += 1
        if self.number == 1 and self._is_known:
            return self._loss
        is_start = not self._is_known and self.is_untouched
        assert self._closure is not None
        try:
            loss = self._closure()
        except BaseException as error:
            self.failure = error
            raise
        if is_start:  # unless the step has written to weights already, as LookAhead may
            self.snapshot = _copied(self._optimizer)
        if not self._is_known:
            self._is_known, self._loss = True, loss
        return loss

    @property
    def is_untouched(self) -> bool:
        """Whether the step has written to no weight, as far as torch counts."""
        return _num_writes(self._optimizer) == self._num_writes

    def explain(self, failure: Exception) -> str:
        """Say what state a step has left that can't be repeated."""
        state = "some weights may be updated and some not. Resume from the last checkpoint"
        if self.snapshot is not None:
            state = "weights and states are those before it. Run it again"
        what = "an `optimizer.step` that calls its closure more than once" if self.number > 1 else "`optimizer.step`"
        return (
            f"Memory ran out in {what}: {state} with less memory in use, or with `foreach=False`. {_SMALLER} "
            f"{str(failure).splitlines()[0]}"
        )


def _num_writes(optimizer: Optimizer) -> int:
    return sum(parameter._version for group in optimizer.param_groups for parameter in group["params"])


def _copied(optimizer: Optimizer) -> OptimizerSnapshot | None:
    """Copy what a step changes; None if host memory has no room for it, and the step is taken without a copy."""
    try:
        return OptimizerSnapshot(optimizer)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    release(failure)
    rank_zero_warn(
        "Host memory has no room for a copy of weights and states. The optimizer steps without one: if device memory "
        "runs out in the middle of a step, the run ends."
    )
    return None


@contextmanager
def _one_tensor_at_a_time(optimizer: Optimizer) -> Iterator[None]:
    before = [group.get("foreach") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = False
    try:
        yield
    finally:
        for group, foreach in zip(optimizer.param_groups, before, strict=True):
            if "foreach" in group:
                group["foreach"] = foreach
