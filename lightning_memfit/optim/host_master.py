"""Float32 master weights on the host, which an optimizer steps, for half-precision weights on a device.

A gradient leaves the device as soon as backward has completed it (ZeRO-Offload, Ren et al., 2021, arXiv 2101.06840). On
CUDA, copies run on their own stream during the backward pass, and a thread adds them up; on the CPU they are plain.

The optimizer and the module keep one set of parameters, which point to half-precision memory while the model runs, and
to masters and float32 gradients while these are clipped and used: whoever looks then finds what a float32 run has.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.memory import Category
from lightning_memfit.memory.host import is_on_host, keep_on_host, reserve_pinned, return_to_device
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.ledger import state_tensors, tensors_among
from lightning_memfit.optim.states import has_gaps, lay_out, lay_out_all, refuse_shapes
from lightning_memfit.optim.steps import refuse_own_step

_HALF = (torch.bfloat16, torch.float16)
_CHECKED_STEPS = 2  # what is written when a batch ends shows in the next
_BUCKET = 8  # weights that are sent together


class HostMaster:
    """Make an optimizer step float32 masters on the host instead of half-precision weights on a device.

    Afterwards a backward pass adds gradients, in float32, to masters and leaves none on the weights. `optimizer.step()`
    steps the masters and copies them, rounded to nearest, to the weights. Between `show` and `hide` the weights are
    their masters, gradients included, for clipping and the like; a step ends that, and so does the closure of one
    before it runs. Loaded states stay float32. Adam and AdamW use their fused kernel unless a kernel was chosen.

    Parameters may be frozen, unfrozen and added to the optimizer at any time: call `refresh` before the next backward
    pass. A weight that other code writes to is refused at the next step, which would overwrite it. Torch counts such
    writes, except those through `weight.data`: these are found in the first two steps, by their values.

    Host memory per trained weight: 8 bytes for master and gradient, the optimizer's states, and on CUDA 2 pinned bytes,
    each tensor's rounded up to a power of two by torch.

    Args:
        optimizer: Optimizer that has not stepped. Weights other than in float16 or bfloat16 are stepped where they are.
        values: Exact values by weight, in float32 or wider; those on the host become the masters themselves. Weights
            that the optimizer does not have are shown in these, too.

    Raises:
        ValueError: If the optimizer has states in half precision already.
    """

    def __init__(self, optimizer: Optimizer, values: Mapping[Tensor, Tensor] | None = None) -> None:
        self.names: dict[Tensor, str] = {}
        """Names of weights, for messages."""
        self._optimizer: Optimizer | None = None
        self._slots = {weight: _Slot(weight, value) for weight, value in (values or {}).items()}
        self._weights: list[Tensor] = []
        """The optimizer's weights when they were last looked at."""
        self._num_marked = 0
        self._is_laid_out = False
        self._checks_left = _CHECKED_STEPS
        self._transfer: _Transfer | None = None
        self._handles: list[Any] = []
        self._last_handle: Any = None
        self._is_shown = False
        self.depth = 0
        """Steps of the optimizer's classes that run: torch may call hooks in each `super().step()`, too."""
        self.attach(optimizer)

    @property
    def num_parameters(self) -> int:
        """Number of weights that are trained and have a master."""
        return sum(slot.is_trained for slot in self._slots.values())

    def master_of(self, weight: Tensor) -> Tensor | None:
        """The exact value of a weight, or None where none is kept."""
        slot = self._slots.get(weight)
        return None if slot is None else slot.exact

    def attach(self, optimizer: Optimizer) -> None:
        """Let an optimizer step the masters from now on; nothing if it does."""
        if optimizer is self._optimizer:
            return
        refuse_own_step(optimizer, _OWN_STEP)
        if any(value.dtype in _HALF for _, value in state_tensors(optimizer)):
            raise ValueError(
                f"`optimizer` ({type(optimizer).__name__}) has states already, in half precision. Move it before it "
                "steps; one that makes its states when it is constructed, as Adagrad does, can't be moved."
            )
        self._detach()
        self._optimizer = optimizer
        self.refresh()
        clear = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            self.wait()
            for slot in self._slots.values():
                slot.gradient = None
            clear(set_to_none)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_load_state_dict_pre_hook(self._open),
            optimizer.register_load_state_dict_post_hook(self._close),
        ]

    def refresh(self) -> None:
        """Follow parameters that were unfrozen or given to the optimizer since the last call."""
        assert self._optimizer is not None
        refuse_own_step(self._optimizer, _OWN_STEP)
        self.depth = 0
        self.hide()  # in case the last step failed
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        if len(weights) != len(self._weights) or not all(map(is_, weights, self._weights)):
            self._weights = weights
            for weight in weights:
                if weight not in self._slots and weight.dtype in _HALF:
                    self._slots[weight] = _Slot(weight, weight.detach())
                if weight in self._slots:
                    self._slots[weight].train()
            _take_fused_kernel(self._optimizer)
        for weight, slot in self._slots.items():
            if slot.handle is None and slot.is_trained and weight.requires_grad:
                self._transfer = self._transfer or _Transfer(slot.half.device)
                slot.follow(self._transfer)
        if self._last_handle is not None:
            self._last_handle.remove()
        # After every other hook of the step, so that these find masters.
        self._last_handle = self._optimizer.register_step_post_hook(self._end)

    def wait(self) -> None:
        """Wait until all gradients have arrived."""
        for slot in self._slots.values():
            if slot.arrival is not None:
                slot.wait()

    def show(self, check: bool = True) -> None:
        """Let weights be their masters, once all gradients have arrived; with `check`, look at values in first steps.

        Raises:
            RuntimeError: If other code has written to a weight, which the next step would overwrite.
        """
        if self._is_shown:
            return
        self.wait()
        self._refuse_changes(thoroughly=check)
        for weight, slot in self._slots.items():
            slot.version = weight._version
            weight.data = slot.exact
            if slot.handle is not None:
                weight.grad = slot.gradient
        self._is_shown = True

    def hide(self) -> None:
        """Let weights be those on the device again, with the masters' values."""
        if not self._is_shown:
            return
        sent = []
        for weight, slot in self._slots.items():
            if slot.handle is not None:
                slot.gradient, weight.grad = weight.grad, None
            is_changed = weight._version != slot.version
            if weight.data_ptr() != slot.exact.data_ptr():
                is_changed, self._is_laid_out = True, False
                slot.keep(weight.data.to("cpu"))
            weight.data = slot.half
            slot.hidden_version = weight._version
            if is_changed or slot.is_trained:
                sent.append(slot)
        self._is_shown = False
        if sent:
            self._transfer = self._transfer or _Transfer(sent[0].half.device)
            self._transfer.to_device(sent)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show masters for a while; inside an optimizer's step they stay."""
        before = self._is_shown
        self.show(check=False)
        try:
            yield
        finally:
            if not before:
                self.hide()

    def remove(self) -> None:
        """Put masters in the place of weights. Elements that other code has written to stay. Safe to call twice."""
        self.hide()
        self.wait()
        self._detach()
        for slot in self._slots.values():
            slot.release()
        self._slots.clear()
        if self._transfer is not None and self._transfer.thread is not None:
            self._transfer.thread.shutdown()
        self._transfer = None

    # --- the optimizer's hooks --------------------------------------------------------------------------------------

    def _begin(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.depth += 1
        if self.depth > 1:
            return None
        args, closure = args[:1], args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            return args, {**kwargs, "closure": partial(self._evaluate, closure)}
        self.show()
        self._lay_out()
        return None

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self.hide()  # an optimizer that evaluates its closure several times has moved the masters in between
        loss = closure()
        self.show()
        self._lay_out()
        return loss

    def _lay_out(self) -> None:
        """Just before a fused kernel: hooks may have exchanged gradients."""
        assert self._optimizer is not None
        if not self._is_laid_out:
            lay_out_all(self._optimizer)
            self._is_laid_out = True
        for weight in self._weights:
            gradient = weight.grad
            if gradient is not None and gradient.layout is torch.strided and gradient.stride() != weight.stride():
                lay_out(weight, {})

    def _end(self, *_: Any) -> None:
        assert self._optimizer is not None
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return
        if len(self._optimizer.state) != self._num_marked:
            self._mark_states()
        self.hide()

    def _open(self, optimizer: Optimizer, states: dict[str, Any]) -> None:
        refuse_shapes(optimizer, states)
        self.show(check=False)  # or torch would cast states to the weights' dtype

    def _close(self, *_: Any) -> None:
        assert self._optimizer is not None
        self._is_laid_out = False
        self._mark_states()
        self.hide()
        _take_fused_kernel(self._optimizer)  # states may come from a run that had another

    def _mark_states(self) -> None:
        assert self._optimizer is not None
        self._num_marked = len(self._optimizer.state)
        for weight, state in self._optimizer.state.items():
            for value in tensors_among(state.values()) if weight in self._slots else ():
                if value.layout is torch.strided and not is_on_host(value):
                    keep_on_host(value, Category.OPTIMIZER_STATE, weight)

    def _detach(self) -> None:
        self._weights, self._num_marked, self._is_laid_out, self.depth = [], 0, False, 0
        for handle in (*self._handles, *([] if self._last_handle is None else [self._last_handle])):
            handle.remove()
        self._handles, self._last_handle = [], None
        if self._optimizer is not None:
            vars(self._optimizer).pop("zero_grad", None)
            self._optimizer = None

    def _refuse_changes(self, thoroughly: bool) -> None:
        thoroughly &= self._checks_left > 0
        self._checks_left -= thoroughly
        for weight, slot in self._slots.items():
            if slot.is_fake:
                continue
            # Rounding may hide a small change, of which only torch's count of writes is left.
            is_same = weight._version == slot.hidden_version and weight.data_ptr() == slot.half.data_ptr()
            if is_same and not (thoroughly and slot.differs()):
                continue
            name = self.names.get(slot.weight, f"of shape {tuple(slot.weight.shape)}")
            raise RuntimeError(
                f"The weight {name} was written to by other code than the optimizer (clamping, swapping in averaged "
                "weights, `max_norm` of an embedding, loading). Its float32 master on the host was not, and the next "
                "step would overwrite what was written. Write to it while it is its master (`HostMaster.shown()`; in "
                "Lightning `with HostMasterWeights.float32_weights():`), or train without masters."
            )


class _Slot:
    """One weight, with its exact value, gradient and buffers on the host."""

    def __init__(self, weight: Tensor, value: Tensor) -> None:
        self.weight = weight
        self.half = weight.data
        self.is_trained = False
        self.staging: Tensor | None = None
        self.gradient: Tensor | None = None
        self.is_fake = isinstance(self.half, FakeTensor)
        self.version = self.hidden_version = weight._version
        """Torch's counts of writes when the exact value was last shown, and when it was last hidden."""
        self.arrival: Future[None] | None = None
        """Of a gradient that is on its way."""
        self.handle: Any = None
        """Of the hook that sends gradients to the host."""
        self._buffer: Tensor | None = None
        self._dtype = value.dtype
        self.keep(value.detach().to("cpu", torch.promote_types(value.dtype, torch.float32)))

    def keep(self, value: Tensor) -> None:
        """Let a value on the host be the exact one."""
        self.exact = value
        keep_on_host(value, Category.PARAMETER, self.weight)

    def train(self) -> None:
        """Make it the master, in float32, unless it is."""
        if self.is_trained:
            return
        if self.exact.dtype is not torch.float32:
            self.keep(self.exact.float())
        self.is_trained = True
        self.staging = torch.empty_like(self.half, device="cpu", pin_memory=True) if self.half.is_cuda else None
        reserve_pinned(self.half.nbytes, Category.TEMPORARY, self.weight)

    def follow(self, transfer: "_Transfer") -> None:
        """Send gradients to the host from now on; those that came before move there."""
        self.handle = self.weight.register_post_accumulate_grad_hook(partial(transfer.to_host, self))
        if self.weight.grad is not None:
            transfer.to_host(self, self.weight)

    def differs(self) -> bool:
        """Whether the weight on the device is another than its rounded master."""
        with _disable_current_modes(), torch.no_grad():  # no part of what a ledger should count
            return with_changes(self.exact, self.half) is not self.exact

    def make_room(self) -> bool:
        """Whether the master had no gradient; it has one afterwards, whose values are to be overwritten."""
        if self.gradient is not None:
            return False
        if self._buffer is None:
            self._buffer = torch.empty_like(self.exact, requires_grad=False)
            keep_on_host(self._buffer, Category.GRADIENT, self.weight)
        self.gradient = self._buffer
        return True

    def add(self, gradient: Tensor, is_new: bool) -> None:
        """Add a dense gradient, or write it over what is there."""
        assert self.gradient is not None
        if is_new:
            self.gradient.copy_(gradient)
        else:
            self.gradient.add_(gradient)

    def wait(self) -> None:
        assert self.arrival is not None
        arrival, self.arrival = self.arrival, None
        arrival.result()

    def release(self) -> None:
        """Leave the weight alone from now on, with its exact value."""
        if self.handle is not None:
            self.handle.remove()
        return_to_device(self.exact)
        value = with_changes(self.exact, self.weight.data)
        self.weight.data = value.double() if self._dtype is torch.float64 else value


class _Transfer:
    """Copies between host and one device."""

    def __init__(self, device: torch.device) -> None:
        is_asynchronous = DeviceKind.of(device).is_asynchronous
        self._stream: Any = torch.cuda.Stream(device) if is_asynchronous else None
        self.thread = ThreadPoolExecutor(1, "gradients") if is_asynchronous else None
        self._sent: Any = None  # when the weights are where they were last sent

    def to_host(self, slot: _Slot, weight: Tensor) -> None:
        """Move a gradient from the device to the host."""
        gradient, weight.grad = weight.grad, None
        if gradient is None:  # a hook of others has taken it away
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"The gradient of a weight of shape {tuple(weight.shape)} is sparse, and only dense ones are added up "
                "on the host. Make its embedding with `sparse=False`, or train without masters."
            )
        if slot.arrival is not None:
            slot.wait()  # the staging memory may still hold the last micro-batch's gradient
        is_new = slot.make_room()
        if self.thread is None:
            slot.add(gradient, is_new)
            return
        self._stream.wait_stream(torch.cuda.current_stream(weight.device))
        with torch.cuda.stream(self._stream):
            assert slot.staging is not None
            slot.staging.copy_(gradient, non_blocking=True)
            copied = self._stream.record_event()
        gradient.record_stream(self._stream)  # keeps its memory from being used again before it is copied
        slot.arrival = self.thread.submit(_add_when, copied, slot, is_new)

    @torch.no_grad()
    def to_device(self, slots: list[_Slot]) -> None:
        """Copy masters to the weights; rounds some into pinned memory while those before them are copied."""
        plain = [(slot.half, slot.exact) for slot in slots if slot.staging is None]
        if plain:
            torch._foreach_copy_([half for half, _ in plain], [exact for _, exact in plain])
        pinned = [slot for slot in slots if slot.staging is not None]
        if not pinned:
            return
        if self._sent is not None:
            self._sent.synchronize()  # the staging memory may still hold the values before these
        device = self._stream.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for start in range(0, len(pinned), _BUCKET):
            bucket = [(slot.half, slot.staging, slot.exact) for slot in pinned[start : start + _BUCKET]]
            halves, staging, exact = map(list, zip(*bucket, strict=True))
            torch._foreach_copy_(staging, exact)
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(halves, staging, non_blocking=True)
        self._sent = self._stream.record_event()
        torch.cuda.current_stream(device).wait_stream(self._stream)


def _add_when(copied: Any, slot: _Slot, is_new: bool) -> None:
    copied.synchronize()
    assert slot.staging is not None
    with torch.no_grad():
        slot.add(slot.staging, is_new)


def with_changes(exact: Tensor, current: Tensor) -> Tensor:
    """An exact value, with the elements of its rounded copy that are no longer what rounding gave."""
    if current.dtype is exact.dtype or current.shape != exact.shape:
        return current
    if isinstance(current, FakeTensor) or current.is_meta:
        return exact
    current = current.detach().to(exact.device)
    changed = (current != exact.to(current.dtype)) & ~(current.isnan() & exact.isnan())
    return torch.where(changed, current.to(exact.dtype), exact) if bool(changed.any()) else exact


_OWN_STEP = "which would find weights and gradients in another form than a plain run has"


def _take_fused_kernel(optimizer: Optimizer) -> None:
    """Choose the fused kernel of Adam and AdamW, about seven times as fast on a CPU, unless the user chose a kernel."""
    if type(optimizer) not in (Adam, AdamW):
        return
    for group in optimizer.param_groups:
        chosen = group["fused"] is not None or group["foreach"] is not None
        chosen |= any(weight.dtype not in _HALF and has_gaps(weight) for weight in group["params"])
        if not chosen and not group["differentiable"] and not isinstance(group["lr"], Tensor):
            group["fused"] = True
