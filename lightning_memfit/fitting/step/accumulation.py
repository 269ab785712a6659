"""`Accumulation`: forward and backward of the micro-batches of one loader batch, one after the other.

Training and the self-check run the same code, so that hooks on weights, own backward passes and recomputation take part
in what is checked.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_memfit.fitting.recovery.step_state import (
    PartStates,
    Place,
    Saved,
    changed_since,
    copies_frozen_weights,
    held,
    is_look,
    places_of,
    put_back,
    sampled_weights,
)
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.outputs import StepOutputs

_SKIPS = (
    "`training_step` returned None, which skips a batch, for some micro-batches of a batch and not others: the "
    "whole batch would be skipped or not. Return a loss of zero weight for them, or keep the whole share in one "
    "micro-batch."
)
_WRITTEN_WHEN_CLEARED = (
    "`on_before_zero_grad` or `optimizer_zero_grad` changes `{}` between forward and backward of a split batch: "
    "forward of the next micro-batches would see the new weights. Change them in `on_train_batch_end`, which "
    "is called once per batch, or keep the whole share in one micro-batch."
)


class Accumulation:
    """Runs micro-batches, each from the state of the module that the batch started from, and adds up gradients."""

    def __init__(self, loop: MicroBatchLoop, is_sharded: bool) -> None:
        self._loop = loop
        self._is_sharded = is_sharded
        self._once: dict[str, Place] = {}
        self._left: Saved = {}
        self._num_clears = 0
        self.written: dict[str, Place] = {}  # to which steps were seen to write
        self.before_forward: Callable[[], None] | None = None  # while steps are compared

    def run(
        self,
        request: StepRequest,
        parts: list[Any],
        sizes: list[int],
        weights: list[float],
        divisors: list[float],
        outputs: StepOutputs,
        saved: Saved,
        clear: Callable[[], None] | None = None,
        is_first_of_window: bool = True,
        announce: bool = False,
        is_final: bool = False,
    ) -> ClosureResult:
        """Run forward and backward of the parts of a batch, whose losses are divided by divisors.

        Parts are dropped from their list when they have run. What is in `saved` was on the module before the batch;
        places to which hooks write are added. `clear` clears gradients after the first forward, as Lightning does.

        Raises:
            MisconfigurationException: If some micro-batches are skipped and others aren't.
        """
        last = len(parts) - 1
        counted = [index for index, weight in enumerate(weights) if weight]
        announced = counted[-1] if counted else last
        states = None
        if last and self.written:
            places = {name: place for name, place in self.written.items() if name not in self._once}
            states = PartStates(places, saved)
        skips: set[bool] = set()
        outputs.begin(len(parts))
        result: ClosureResult | None = None
        try:
            for index, weight in enumerate(weights):
                outputs.logs.begin_part(weight, sizes[index])
                part, parts[index], result = parts[index], None, None  # nothing of the last one is alive in forward
                if index:
                    put_back(saved, self._once)
                    if states is not None:
                        states.before_next()
                clears = clear is not None and not index
                if self.before_forward is not None:
                    self.before_forward()
                result = self._loop.forward(request, part, divisors[index])
                del part
                skips.add(result.closure_loss is None)
                if len(skips) > 1:
                    raise MisconfigurationException(_SKIPS)
                if clears and clear is not None:
                    self._clear(clear, saved, is_split=last > 0)
                if index == last and is_first_of_window and self._left:
                    put_back(self._left)
                announces = announce and index == announced
                so_far = outputs.loss if announces else None
                self._backward(request, result, weight, so_far, announces, is_final and index == last)
                if last:
                    outputs.add(result, weight, sizes[index])
                if states is not None:
                    states.add(sizes[index])
        finally:
            outputs.end()
        if states is not None:
            states.finish()
        assert result is not None
        return result

    # --- one micro-batch --------------------------------------------------------------------------------------------

    def _clear(self, clear: Callable[[], None], saved: Saved, is_split: bool) -> None:
        """Clear the gradients, once for all micro-batches: what hooks write then is not for the next ones to see.

        In a run without micro-batches they write it between forward and backward of the whole batch.

        Raises:
            MisconfigurationException: If they write to weights in training, of which the next forward would see it.
        """
        module = self._loop.module
        if not self._loop.has_zero_grad_hooks:
            clear()
            return
        self._num_clears += 1
        looks = is_look(self._num_clears)
        places = places_of(module) if looks else {n: one for n, one in self._once.items() if n not in saved}
        before = held(places.values(), copies_frozen_weights(module))
        weights = sampled_weights(module) if looks and is_split else {}
        clear()
        now = sampled_weights(module) if weights else {}
        if written := [name for name, one in weights.items() if not one.equal(now[name])]:
            raise MisconfigurationException(_WRITTEN_WHEN_CLEARED.format(written[0]))
        if looks:
            found = changed_since(before, module)
            if any(isinstance(place.read(), nn.Parameter) for place in found.values()):  # a teacher: all of it follows
                found |= {n: place for n, place in places.items() if isinstance(place.read(), nn.Parameter)}
            self._once |= found
        saved |= {name: before.get(name, (place, None)) for name, place in self._once.items() if name not in saved}
        self._left = held(self._once.values())

    def _backward(
        self,
        request: StepRequest,
        output: ClosureResult,
        weight: float,
        so_far: Tensor | None,
        announce: bool,
        is_final: bool,
    ) -> None:
        """Run backward; a micro-batch whose labels are all masked has a loss of 0/0 and no gradient."""
        loss, output.closure_loss = output.closure_loss, None
        if loss is None:
            return
        if not weight:
            if not self._is_sharded:
                return
            loss = loss.nan_to_num() * 0.0  # sharded backward communicates: no rank may skip one
        if so_far is not None:
            loss = loss + so_far  # a constant: hooks see the loss of the whole batch
        self._loop.backward(request, loss, announce, is_final)
