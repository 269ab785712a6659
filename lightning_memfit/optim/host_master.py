"""Float32 master weights on the host, which an optimizer steps, for half-precision weights on a device.

The device holds weights and activations; a gradient leaves it as soon as backward has completed it (ZeRO-Offload, Ren
et al., 2021, arXiv 2101.06840). On CUDA, copies run on their own stream during the backward pass, and a thread adds
them up; on the CPU they are plain copies.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_memfit.memory import Category
from lightning_memfit.memory.host import keep_on_host, reserve_pinned, return_to_device
from lightning_memfit.memory.kind import DeviceKind


class HostMaster:
    """Make an optimizer step float32 masters on the host instead of half-precision weights on a device.

    Afterwards a backward pass adds gradients, in float32, to `.grad` of the masters and leaves none on the weights;
    call `wait` before reading them. `optimizer.step()` steps the masters and copies them, rounded to nearest, to the
    weights. Groups, schedulers and hooks of the optimizer stay; Adam and AdamW use their fused kernel unless `foreach`
    or `fused` was chosen.

    Host memory per weight: 8 bytes for master and gradient, the optimizer's states, and on CUDA 2 pinned bytes.

    Args:
        optimizer: Optimizer of float16 or bfloat16 weights that has not stepped. Weights of other dtypes are stepped
            where they are.
        values: Exact values by weight, on the host in float32; those given become the masters.

    Raises:
        ValueError: If the optimizer has states already or no half-precision weight.
    """

    def __init__(self, optimizer: Optimizer, values: Mapping[Tensor, Tensor] | None = None) -> None:
        if optimizer.state:
            raise ValueError(f"`optimizer` ({type(optimizer).__name__}) has states already. Move it before it steps.")
        self._optimizer = optimizer
        self._slots: dict[Tensor, _Slot] = {}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.dtype in (torch.bfloat16, torch.float16):
                    self._slots[weight] = _Slot(weight, (values or {}).get(weight))
        if not self._slots:
            raise ValueError(f"`optimizer` ({type(optimizer).__name__}) has no weight of bfloat16 or float16.")
        self._transfer = _Transfer(next(iter(self._slots)).device)
        self._exchange({weight: slot.master for weight, slot in self._slots.items()})
        _take_fused_kernel(optimizer)
        self._handles: list[Any] = [
            weight.register_post_accumulate_grad_hook(partial(self._transfer.to_host, slot))
            for weight, slot in self._slots.items()
            if weight.requires_grad
        ]
        self._handles.append(optimizer.register_step_pre_hook(self.wait))
        self._handles.append(optimizer.register_step_post_hook(self._send))

    @property
    def num_parameters(self) -> int:
        """Number of weights that have a master."""
        return len(self._slots)

    def master_of(self, weight: Tensor) -> Tensor | None:
        """The float32 master of a weight, or None where it has none."""
        slot = self._slots.get(weight)
        return None if slot is None else slot.master.detach()

    def wait(self, *_: Any) -> None:
        """Wait until all gradients have arrived."""
        for slot in self._slots.values():
            slot.wait()

    def remove(self, keep_masters: bool = False) -> None:
        """Let the optimizer step its weights again, with the states it has. Safe to call twice.

        Args:
            keep_masters: Replace the weights by their masters, in float32 and on the host.
        """
        if not self._handles:
            return
        self.wait()
        while self._handles:
            self._handles.pop().remove()
        self._exchange({slot.master: weight for weight, slot in self._slots.items()})
        for weight, slot in self._slots.items():
            if slot.master in self._optimizer.state:
                self._optimizer.state[weight] = self._optimizer.state.pop(slot.master)
            if keep_masters:
                return_to_device(slot.master)
                weight.data = slot.master.data
        self._transfer.close()

    def _exchange(self, replacement: Mapping[Tensor, Tensor]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [replacement.get(parameter, parameter) for parameter in group["params"]]

    def _send(self, *_: Any) -> None:
        with torch.no_grad():
            self._transfer.to_device([slot for slot in self._slots.values() if slot.master.grad is not None])


class _Slot:
    """One weight, with its master, gradient and buffers on the host."""

    def __init__(self, weight: Tensor, value: Tensor | None) -> None:
        value = weight.detach() if value is None else value
        self.weight = weight
        self.master = nn.Parameter(value.to("cpu", torch.float32), requires_grad=weight.requires_grad)
        keep_on_host(self.master, Category.PARAMETER, weight)
        self.staging = torch.empty_like(weight, device="cpu", pin_memory=True) if weight.is_cuda else None
        reserve_pinned(weight.nbytes, Category.TEMPORARY, weight)
        self._gradient: Tensor | None = None
        self._arrival: Future[None] | None = None

    def expect(self) -> bool:
        """Give the master a gradient, and return whether it is new, so that it must be overwritten."""
        if self.master.grad is not None:
            return False
        if self._gradient is None:
            self._gradient = torch.empty_like(self.master, requires_grad=False)
            keep_on_host(self._gradient, Category.GRADIENT, self.weight)
        self.master.grad = self._gradient
        return True

    def add(self, gradient: Tensor, is_new: bool) -> None:
        assert self._gradient is not None
        if is_new:
            self._gradient.copy_(gradient)
        else:
            self._gradient.add_(gradient)

    def add_later(self, arrival: "Future[None]") -> None:
        self._arrival = arrival

    def wait(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.result()


class _Transfer:
    """Copies between host and one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if DeviceKind.of(device).is_asynchronous else None
        self._thread = ThreadPoolExecutor(1, "gradients") if DeviceKind.of(device).is_asynchronous else None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def to_host(self, slot: _Slot, weight: Tensor) -> None:
        """Move a gradient from the device to the host."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if self._thread is None:
            slot.add(gradient, slot.expect())
            return
        slot.wait()  # the staging memory may still hold the last micro-batch's gradient
        is_new = slot.expect()
        self._stream.wait_stream(torch.cuda.current_stream(weight.device))
        with torch.cuda.stream(self._stream):
            assert slot.staging is not None
            slot.staging.copy_(gradient, non_blocking=True)
            copied = self._stream.record_event()
        gradient.record_stream(self._stream)  # keeps its memory from being used again before it is copied
        slot.add_later(self._thread.submit(_add_when, copied, slot, is_new))

    def to_device(self, slots: list[_Slot]) -> None:
        """Copy masters to the weights, rounding each while the one before it is copied."""
        if self._stream is None:
            for slot in slots:
                slot.weight.copy_(slot.master)
            return
        device = self._stream.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        for slot in slots:
            assert slot.staging is not None
            slot.staging.copy_(slot.master)
            with torch.cuda.stream(self._stream):
                slot.weight.copy_(slot.staging, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(self._stream)


def _add_when(copied: Any, slot: _Slot, is_new: bool) -> None:
    copied.synchronize()
    assert slot.staging is not None
    with torch.no_grad():
        slot.add(slot.staging, is_new)


def _take_fused_kernel(optimizer: Optimizer) -> None:
    """Choose the fused kernel of Adam and AdamW, about seven times as fast on a CPU, unless the user chose a kernel."""
    if type(optimizer) not in (Adam, AdamW):
        return
    for group in optimizer.param_groups:
        chosen = group["fused"] is not None or group["foreach"] is not None
        if not chosen and not group["differentiable"] and not isinstance(group["lr"], Tensor):
            group["fused"] = True
