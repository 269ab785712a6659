"""`HostStates`: optimizer states that wait in host memory while forward and backward run."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memfit.checkpointing.offload import MIN_OFFLOAD_BYTES
from lightning_memfit.memory import Category, format_bytes, pinned_block_bytes
from lightning_memfit.memory.host import copy_to_host, is_on_host
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.oom import is_out_of_memory

_AWAY = WeakIdKeyDictionary()
"""States of all optimizers that wait in host memory."""


class HostStates:
    """Sends the states of an optimizer to host memory now and after each step, and fetches them before each step.

    A state stays the tensor that it is and only its values move, so that `state_dict` is complete at any
    time. A hook of `optimizer.step` fetches them, and hooks are called before the step's closure: forward and
    backward must have run by then, and states that are sent away within a closure be fetched after it. `StepGuard`
    ensures both.

    Copies run on the current stream, as nothing could run meanwhile: states leave after a step that used them, and
    forward needs the memory that they free. On CUDA the host side is pinned if there is room, and kept for reuse.

    Args:
        optimizer: An optimizer for which `reason_to_stay` returns None.
        free_bytes: Host memory that may be used.

    Attributes:
        size_bytes: Bytes that were sent to the host at first.
    """

    def __init__(self, optimizer: Optimizer, free_bytes: int) -> None:
        self._optimizer = optimizer
        self._buffers = WeakIdKeyDictionary()
        self._pins = sum(pinned_block_bytes(state.nbytes) for state in _present(optimizer)) <= free_bytes
        self._send()
        self.size_bytes = absent_bytes(optimizer)
        fetch = partial(_fetch_before_step, optimizer)
        self._handles = [optimizer.register_step_pre_hook(fetch), optimizer.register_step_post_hook(self._send)]

    def stop(self) -> None:
        """Send no more states, and fetch those on the host: now, or by the next step if there is no room now."""
        fetch, *send = self._handles
        for handle in send:
            handle.remove()
        self._handles = [fetch]
        with suppress(RuntimeError):  # out of memory, or a device error, which the next step reports better
            fetch_states(self._optimizer)
            fetch.remove()

    @torch.no_grad()
    def _send(self, *_: Any) -> None:
        """Send all states; on return they are complete on the host, where a checkpoint may be written from them."""
        device = None
        for state in list(_present(self._optimizer)):
            buffer = self._buffers.get(state)
            if buffer is None or buffer.shape != state.shape or buffer.dtype != state.dtype:
                self._buffers[state] = buffer = self._host_like(state)
            buffer.copy_(state, non_blocking=True)
            _AWAY[state], device = True, state.device
            state.data = buffer
        if device is not None and DeviceKind.of(device).is_asynchronous:
            torch.cuda.current_stream(device).synchronize()

    def _host_like(self, state: Tensor) -> Tensor:
        """Allocate host memory for a state."""
        if not state.is_cuda:
            return copy_to_host(state, Category.OPTIMIZER_STATE)
        try:
            return torch.empty_strided(
                state.size(), state.stride(), dtype=state.dtype, device="cpu", pin_memory=self._pins
            )
        except RuntimeError as error:
            if not (self._pins and is_out_of_memory(error)):
                raise
            self._pins = False
            return self._host_like(state)


def reason_to_stay(optimizer: Optimizer, free_bytes: int) -> str | None:
    """Return why the states of an optimizer can't wait in host memory, or None if they can.

    Args:
        optimizer: The optimizer, after its first step.
        free_bytes: Host memory that may be used.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        return "LBFGS runs forward and backward within its step"
    if getattr(optimizer, "is_paged", False):
        return f"{name} pages them between device and host by itself"
    if hasattr(optimizer, "consolidate_state_dict"):
        return f"{name} divides them among ranks"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "with `capturable=True` a captured step expects them where they are"
    size_bytes = sum(state.nbytes for state in _present(optimizer))
    if not size_bytes and not absent_bytes(optimizer):
        return f"{name} has no plain states of {MIN_OFFLOAD_BYTES >> 10} KiB or more on the device"
    if size_bytes > free_bytes:
        return f"they take {format_bytes(size_bytes)}, and {format_bytes(free_bytes)} of host memory are free for them"
    return None


@torch.no_grad()
def fetch_states(optimizer: Optimizer) -> None:
    """Fetch all states to the device. If memory runs out midway, another call fetches the rest."""
    for parameter, state in list(_states(optimizer)) if _AWAY else ():
        if state in _AWAY:
            values = torch.empty_strided(state.size(), state.stride(), dtype=state.dtype, device=parameter.device)
            values.copy_(state, non_blocking=True)
            state.data = values
            del _AWAY[state]


def _fetch_before_step(optimizer: Optimizer, *_: Any) -> None:
    fetch_states(optimizer)


def absent_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of states that wait on the host and will be on the device during the step."""
    return sum(state.nbytes for _, state in _states(optimizer) if state in _AWAY) if _AWAY else 0


def _states(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parameters with their states, each state once."""
    seen: set[int] = set()
    for parameter, state in getattr(optimizer, "state", {}).items():
        for value in state.values() if isinstance(parameter, Tensor) else ():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                yield parameter, value


def _present(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield states on their parameter's device that can leave it: plain tensors with their own storage, not small."""
    for parameter, state in _states(optimizer):
        if type(state) is Tensor and state.layout is torch.strided and state.device == parameter.device:
            is_alone = state.untyped_storage().nbytes() == state.nbytes and state._base is None
            if is_alone and state.nbytes >= MIN_OFFLOAD_BYTES and not is_on_host(state) and state not in _AWAY:
                yield state
