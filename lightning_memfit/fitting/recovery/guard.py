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
from torch import Tensor
from torch.optim import Optimizer

from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.memory.host_copy import HostCopy
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.memory.state import Held, restore_dict
from lightning_memfit.memory.wrapping import wrap_method

_NOTHING: AbstractContextManager[None] = nullcontext()
_SMALLER = "Smaller states need less: `Optimizer8bit()` or `ReplaceOptimizer('torch.Adafactor')`."


class StepGuard:
    """Makes the first step of an optimizer repeatable, once.

    The retry runs with `foreach=False` and an emptied cache, so that it needs the temporaries of one tensor only.
    """

    def __init__(self) -> None:
        self._stepped: WeakSet[Optimizer] = WeakSet()

    def __call__(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Guard the steps of an optimizer within the context."""
        return _NOTHING if optimizer in self._stepped else self._guarded(optimizer)

    @contextmanager
    def _guarded(self, optimizer: Any) -> Iterator[None]:
        unwrap = wrap_method(optimizer, "step", partial(self._step, optimizer))
        try:
            yield
        finally:
            unwrap()

    def _step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run the first step with its closure, and repeat it if memory ran out in it.

        A gradient scaler runs the closure by itself, and calls the real step without one.

        Raises:
            MemoryExhausted: If memory runs out again, or after the step had called its closure more than once; the
                message says whether weights are those before the step.
        """
        snapshot, calls = _copied(optimizer), _Calls(closure)
        if closure is not None:
            kwargs["closure"] = calls
        for is_retry in (False, True):
            calls.number = 0
            try:
                with _one_tensor_at_a_time(optimizer) if is_retry else _NOTHING:
                    result = step(**kwargs)
            except Exception as error:
                failure = error
            else:
                self._stepped.add(optimizer)
                return result
            if snapshot is not None:
                snapshot.restore()
            if not is_out_of_memory(failure) or failure is calls.failure:
                raise failure
            if is_retry or snapshot is None or calls.number > 1:
                break
            release(failure)
            rank_zero_warn(
                "Memory ran out in `optimizer.step`; the step is repeated tensor by tensor (`foreach=False`)."
            )
        how = " twice, at last with the temporaries of one tensor only" if is_retry else ""
        if calls.number > 1:
            how = ", which calls its closure more than once"
        state = "weights and states are those before it. Run it again with less memory in use"
        if snapshot is None:
            state = "some weights may be updated and some not. Resume from the last checkpoint with less memory in use"
        words = str(failure).splitlines()[0]
        raise MemoryExhausted(f"Memory ran out in `optimizer.step`{how}: {state}. {_SMALLER} {words}") from failure


class _Calls:
    """The closure of a step. What its first call returns is kept for the repetition, other calls compute.

    Attributes:
        number: How often the step has called it since it began.
        failure: The error that the last call ended in, if it did.
    """

    def __init__(self, closure: Callable[[], Any] | None) -> None:
        self._closure = closure
        self._kept: list[Any] = []
        self.number = 0
        self.failure: BaseException | None = None

    def __call__(self) -> Any:
        """Run forward and backward, and return the loss."""
        self.number += 1
        if self.number == 1 and self._kept:
            return self._kept[0]
        assert self._closure is not None
        try:
            loss = self._closure()
        except BaseException as error:
            self.failure = error
            raise
        self._kept.append(loss)
        return loss


class OptimizerSnapshot:
    """Parameters of an optimizer, its states, hyper-parameters and own attributes, in host memory.

    Tensors and dicts of states keep their identity on restoring. States that did not exist are removed again.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states = [
            (p, state, {key: Held(value, copy=HostCopy) for key, value in state.items()})
            for p, state in optimizer.state.items()
        ]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [value for group in self._groups for value in group.values() if isinstance(value, Tensor)]
        self._tensors = [(tensor, HostCopy(tensor)) for tensor in tensors]
        self._attributes = dict(vars(optimizer))

    def restore(self) -> None:
        """Put everything back."""
        optimizer = self._optimizer
        for tensor, copy in self._tensors:
            copy.restore(tensor)
        optimizer.state.clear()
        for parameter, state, values in self._states:  # the same dicts, which a step in progress may hold (LBFGS)
            restore_dict(state, {key: value.restored() for key, value in values.items()})
            optimizer.state[parameter] = state
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            restore_dict(group, saved, keep=frozenset(("params",)))
        restore_dict(vars(optimizer), self._attributes)


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
