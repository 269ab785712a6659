"""Recover from an out-of-memory error inside `optimizer.step`.

A step changes weights and states tensor by tensor. When it fails midway, repeating it would apply the first part
twice. So it is repeated only from a known state: nothing was changed yet (the tensors' version counters tell), or a
copy in host memory was taken before. The copy is taken when the risk is real: before the first step, which allocates
the states, and while less memory is free than a step may need for its temporaries. A step that fails midway without a
copy leaves weights that nobody should train on, and the error says so.

Kernels that are called past torch (bitsandbytes', DeepSpeed's) leave version counters as they are. Whether counters
tell what an optimizer writes is seen from its completed steps; where they don't, a step that fails without a copy
counts as one that has changed something.

A step calls its closure when and as often as it likes: most do once at the start, LBFGS and SAM again at other weights.
Each call computes, except that a repeated step gets from its first call what the failed one got.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.fitting.recovery.host_states import absent_bytes, fetch_states, paged_bytes
from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.recovery.rollback import OptimizerSnapshot
from lightning_memfit.fitting.size.device_memory import DeviceMemory, limit_beside
from lightning_memfit.memory.ledger import state_tensors
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.memory.wrapping import own_attribute

_STEPS_BETWEEN_CHECKS = 16
_MAX_RETRIES = 3


class StepGuard:
    """Make optimizer steps repeatable.

    The retry runs with `foreach=False` and an emptied cache, so that it needs the temporaries of one tensor only.

    Args:
        device_memory: Memory of the device, which tells how much is free; with None only the first step is copied.

    Attributes:
        num_retries: Number of steps repeated so far.
    """

    def __init__(self, device_memory: DeviceMemory | None) -> None:
        self._memory = device_memory
        self._steps_to_check = 0
        self._is_at_risk = True
        self._is_first = True
        self._in_trial = False
        self._guarded: _Guarded | None = None
        self._are_counted: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        """Optimizers with completed steps, and whether version counters tell what they write."""
        self.num_retries = 0

    def __call__(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Guard the steps of an optimizer within the context."""
        known = self._guarded
        if known is None or known.optimizer is not optimizer or known.is_entered:  # a trial runs inside a real step
            known = self._guarded = _Guarded(self, optimizer)
        return known

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Take the steps within for those of a trial, which runs inside the closure of a real step or before it."""
        self._in_trial = True
        try:
            yield
        finally:
            self._in_trial = False

    def step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run the step with its closure, and repeat it if memory ran out in it.

        A trial step is copied because it allocates the states, and the real step still counts as the first. A gradient
        scaler runs the closure by itself, and calls the real step without one.

        Raises:
            torch.OutOfMemoryError: If memory runs out in every retry; weights and states are those before the step.
            MemoryExhausted: If memory ran out after some weights may have changed, and there is no copy, or after the
                step had called its closure more than once.
        """
        start = _Start(optimizer, self._are_counted.get(optimizer, False))
        calls = None
        if closure is None:
            start.take(self._is_risky(optimizer))
        else:
            calls = kwargs["closure"] = _Calls(closure, start, optimizer, lambda: self._is_risky(optimizer))
        try:
            if calls is not None and absent_bytes(optimizer):  # a hook before the step fetches them: forward needs room
                calls()
                calls.number = 0
            result = step(**kwargs)
        except Exception as error:
            self._check_repeatable(error, start, calls)
            failure = error
        else:
            are_counted = start.are_writes_counted()
            if are_counted is not None:
                self._are_counted[optimizer] = are_counted
            return result
        self._steps_to_check = 0
        return self._repeat(optimizer, partial(step, **kwargs), failure, start, calls)

    @staticmethod
    def _check_repeatable(error: Exception, start: "_Start", calls: "_Calls | None") -> None:
        """Raise an error unless it is one after which the step can be repeated from its start.

        With a copy, weights are those before the step if its closure failed at other weights or can't be repeated.
        """
        is_memory = is_out_of_memory(error)
        called_again = calls is not None and calls.number > 1
        if called_again and start.snapshot is not None:
            start.snapshot.restore()
        if not is_memory or (calls is not None and error is calls.failure):
            raise error
        if called_again:
            state = "some weights may be updated and some not. Resume from the last checkpoint"
            if start.snapshot is not None:
                state = "weights and states are those before it. Run it again"
            raise MemoryExhausted(
                "Memory ran out in an `optimizer.step` that calls its closure more than once, which can't be repeated; "
                f"{state} with a smaller optimizer state, `foreach=False` or less memory in use."
            ) from error
        if start.snapshot is None and start.may_have_changed:
            raise MemoryExhausted(
                "Memory ran out in the middle of `optimizer.step`, some weights may be updated and some not. Resume "
                "from the last checkpoint with a smaller optimizer state, `foreach=False` or less memory in use."
            ) from error

    def _is_risky(self, optimizer: Optimizer) -> bool:
        if self._in_trial or self._check(optimizer):
            return True
        return optimizer not in self._are_counted and any(p.grad is not None for p in _parameters(optimizer))

    def _repeat(
        self,
        optimizer: Optimizer,
        step: Callable[[], Any],
        failure: Exception,
        start: "_Start",
        calls: "_Calls | None",
    ) -> Any:
        """Repeat a step from the state before it, tensor by tensor."""
        for _ in range(_MAX_RETRIES):
            release(failure)
            if start.snapshot is None:
                start.snapshot = OptimizerSnapshot(optimizer)  # nothing has changed yet
            else:
                start.snapshot.restore()
            if calls is not None:
                calls.number = 0
            self.num_retries += 1
            rank_zero_warn(
                "Memory ran out in `optimizer.step`; the step is repeated tensor by tensor (`foreach=False`)."
            )
            try:
                with _one_tensor_at_a_time(optimizer):
                    return step()
            except Exception as error:
                self._check_repeatable(error, start, calls)
                failure = error
        assert start.snapshot is not None
        release(failure)
        start.snapshot.restore()
        raise MemoryExhausted(
            f"Memory ran out in `optimizer.step` {_MAX_RETRIES + 1} times in a row, at last with the temporaries of "
            "one tensor only. Weights and states are those before the step. Smaller states need less: "
            f"`Optimizer8bit()` or `ReplaceOptimizer('torch.Adafactor')`. {str(failure).splitlines()[0]}"
        ) from failure

    def _check(self, optimizer: Optimizer) -> bool:
        if self._steps_to_check == 0:
            self._steps_to_check = _STEPS_BETWEEN_CHECKS
            self._is_at_risk = self._is_first or self._lacks_memory(optimizer)
            if self._is_first:
                self._is_first = False
                self._steps_to_check = 1
        self._steps_to_check -= 1
        return self._is_at_risk

    def _lacks_memory(self, optimizer: Optimizer) -> bool:
        if self._memory is None:
            return False
        sizes = [parameter.nbytes for parameter in _parameters(optimizer) if parameter.grad is not None]
        free_bytes = limit_beside(self._memory, paged_bytes(optimizer)) - self._memory.live_bytes
        return free_bytes < 2 * int(sum(sizes)) + absent_bytes(optimizer)


class _Start:
    """The state from which a step may be repeated: the one after its first closure call, before it writes to weights.

    Args:
        optimizer: The optimizer, whose step is about to begin.
        is_watched: Whether version counters are known to tell what it writes.

    Attributes:
        snapshot: A copy of that state; None if none was taken.
    """

    def __init__(self, optimizer: Optimizer, is_watched: bool) -> None:
        self._optimizer = optimizer
        self._is_watched = is_watched
        self._num_writes = _num_writes(optimizer)
        self._versions: list[int] | None = None
        self._to_step: list[tuple[torch.Tensor, int, dict[str, tuple[int, int]]]] = []
        self.snapshot: OptimizerSnapshot | None = None

    @property
    def has_changed(self) -> bool:
        """Whether the step has written to weights or states, as far as version counters tell."""
        if self._versions is None:
            return _num_writes(self._optimizer) != self._num_writes
        return _versions(self._optimizer) != self._versions

    @property
    def may_have_changed(self) -> bool:
        """The same, or it may have written past version counters since the state was taken."""
        return self.has_changed or (self._versions is not None and not self._is_watched)

    def take(self, is_risky: bool) -> None:
        """Note the state, and copy it if the step may fail."""
        self.snapshot = _copied(self._optimizer) if is_risky else None
        if self.snapshot is None:
            self._versions = _versions(self._optimizer)
        if not self._is_watched:
            self._to_step = [
                (parameter, parameter._version, self._state_versions(parameter))
                for parameter in _parameters(self._optimizer)
                if parameter.grad is not None and parameter.numel()
            ]

    def are_writes_counted(self) -> bool | None:
        """Whether version counters have told of all that a step, which is complete, must have written.

        It writes to every parameter that had a gradient, and to the tensors of its state. None if a new state leaves
        that open, or there was no gradient.
        """
        if self._is_watched:
            return True
        is_open = not self._to_step
        for parameter, version, states in self._to_step:
            if parameter._version == version:
                return False
            for key, (identity, count) in self._state_versions(parameter).items():
                if states.get(key) == (identity, count):
                    return False
                is_open |= key not in states and count == 0
        return None if is_open else True

    def _state_versions(self, parameter: torch.Tensor) -> dict[str, tuple[int, int]]:
        state = self._optimizer.state.get(parameter) or {}
        return {key: (id(value), value._version) for key, value in state.items() if isinstance(value, torch.Tensor)}


class _Calls:
    """The closure of a step. What its first call returns is kept for repetitions of the step, other calls compute.

    Args:
        closure: The closure, which may write to weights if it puts them back: trial steps do.
        start: Where the step began.
        optimizer: Its states are on the device again when a call returns.
        is_risky: Whether the step may fail; asked when the gradients are there.

    Attributes:
        number: How often the step has called it since it began.
        failure: The error that the last call ended in, if it did.
    """

    def __init__(
        self, closure: Callable[[], Any], start: _Start, optimizer: Optimizer, is_risky: Callable[[], bool]
    ) -> None:
        self._closure = closure
        self._start = start
        self._optimizer = optimizer
        self._is_risky = is_risky
        self._is_known = False
        self._loss: Any = None
        self.number = 0
        self.failure: BaseException | None = None

    def __call__(self) -> Any:
        """Run forward and backward, and return the loss."""
        self.number += 1
        if self.number == 1 and self._is_known:
            return self._loss
        is_start = not self._is_known and not self._start.has_changed
        try:
            loss = self._closure()
        except BaseException as error:
            self.failure = error
            raise
        if is_start:  # unless the step has written to weights already, as LookAhead may
            self._start.take(self._is_risky())
        if not self._is_known:
            self._is_known, self._loss = True, loss
        fetch_states(self._optimizer)  # the closure may have sent them away, after the hook that fetches them
        return loss


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _num_writes(optimizer: Optimizer) -> int:
    return sum(parameter._version for parameter in _parameters(optimizer))


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


class _Guarded(AbstractContextManager[None]):
    """Replaces an optimizer's `step` by the guard's. It is a class, not a generator, as it is entered in every step."""

    __slots__ = ("_own", "_step", "is_entered", "optimizer")

    def __init__(self, guard: StepGuard, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer
        self._step = partial(guard.step, optimizer)
        self._own: Any = None
        self.is_entered = False

    @override
    def __enter__(self) -> None:
        self.is_entered = True
        optimizer = self.optimizer
        self._own = own_attribute(optimizer, "step")
        optimizer.step = partial(self._step, optimizer.step)

    @override
    def __exit__(self, *_: Any) -> None:
        self.is_entered = False
        if self._own is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._own


def _versions(optimizer: Optimizer) -> list[int]:
    found = [parameter._version for parameter in _parameters(optimizer)]
    found.extend(value._version for _, value in state_tensors(optimizer))
    return found


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
