"""Stand-in for torch's `DistributedDataParallel` in traces: memory of its buckets, made and used at the same moments.

torch's own keeps its buckets in C++ (`reducer.cpp`), which reads the memory of tensors, and fakes have none. As there,
gradients are copied into buckets while backward computes them, and are views of these (`gradient_as_bucket_view`) or
keep their own memory. Before the second step's forward pass the buckets are made anew, one by one, and an old one is
freed when the last of its gradients has been moved.

Here each parameter has its part of a bucket as a tensor of its own, so that blocks can be told apart; all parts
together take what the buckets take. The moment of a bucket too many is in every step, so that all steps are alike.
Written for torch 2.11-2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_memfit.profile.replaced import replaced


class TracedDataParallel(DistributedDataParallel):
    """Wrap a module as `DistributedDataParallel` does. Other arguments of torch's change nothing about memory.

    Args:
        module: On fake tensors.
        bucket_cap_mb: Size of a bucket in MiB.
        gradient_as_bucket_view: Keep gradients inside the buckets.
        broadcast_buffers: Send the first rank's buffers before every forward pass.
        static_graph: Known to Lightning only.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        **_: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.static_graph = static_graph
        self.require_forward_param_sync = self.require_backward_grad_sync = True
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = broadcast_buffers
        self.bucket_cap_bytes = round((25 if bucket_cap_mb is None else bucket_cap_mb) * (1 << 20))
        self._parts: dict[Tensor, Tensor] = {}
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._reduce)

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not self._parts:
            self._make_parts()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            sizes = [parameter.nbytes for parameter in self._trained]
            torch.empty(max(*sizes, min(sum(sizes), self.bucket_cap_bytes), 0), dtype=torch.uint8)
        buffers = [buffer for buffer in self.module.buffers() if buffer.numel()] if self.broadcast_buffers else []
        if buffers and self.require_backward_grad_sync:
            for dtype in {buffer.dtype for buffer in buffers}:  # each type is sent as one tensor
                torch.cat([buffer.detach().flatten() for buffer in buffers if buffer.dtype == dtype])
        return self.module(*inputs, **kwargs)

    @override
    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def _make_parts(self) -> None:
        """Make the parameters' parts of buckets."""
        for parameter in self._trained:
            self._parts[parameter] = part = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            torch.distributed.all_reduce(part)  # tells that it is for communication

    @torch.no_grad()
    def _reduce(self, parameter: Tensor) -> None:
        if not self.require_backward_grad_sync or parameter.grad is None:
            return
        part = self._parts[parameter]
        if parameter.grad is not part:
            part.copy_(parameter.grad)
        if self.gradient_as_bucket_view:
            parameter.grad = part


@contextmanager
def traced_data_parallel() -> Iterator[None]:
    """Let Lightning's DDP strategies wrap modules in the stand-in."""
    from lightning.pytorch.strategies import ddp

    with replaced(ddp, "DistributedDataParallel", TracedDataParallel):
        yield
