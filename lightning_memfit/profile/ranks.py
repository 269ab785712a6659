"""Run a step as one rank of many, in one process and without communication.

torch's `fake` process group answers every collective at once and leaves tensors as they are. With it, Lightning's real
strategies, FSDP2 and DTensors do on fake tensors what a rank of the real run does with its memory. Only torch's
`DistributedDataParallel` needs a stand-in (`TracedDataParallel`).

Written for torch 2.11-2.13 and Lightning 2.6.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_memfit.profile.replaced import replaced

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, and the one whose step is traced.

    Raises:
        ValueError: If there is no such rank, or machines of that size don't make up the run.
    """

    make_strategy: "Callable[[], Strategy]"
    """Makes the strategy anew for every trace, as a strategy belongs to one Trainer."""
    world_size: int
    """Ranks of the run."""
    rank: int = 0
    """The one that is traced. The first one often has the most: remainders of a division are the last ones'."""
    ranks_per_machine: int | None = None
    """By default all are on one machine."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"`world_size={self.world_size}` must be at least 1.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"`rank={self.rank}` must be from 0 to {self.world_size - 1}, the last of the run.")
        if self.ranks_per_machine is not None and (
            self.ranks_per_machine < 1 or self.world_size % self.ranks_per_machine
        ):
            raise ValueError(
                f"`ranks_per_machine={self.ranks_per_machine}` must divide the {self.world_size} ranks of the run."
            )

    def trainer_options(self) -> dict[str, Any]:
        """Arguments of a Trainer that runs the strategy as this rank, in its process group (`process_group_of`)."""
        from lightning.fabric.plugins.environments import LightningEnvironment

        per_machine = self.ranks_per_machine or self.world_size
        return {
            "devices": per_machine,
            "num_nodes": self.world_size // per_machine,
            "strategy": self.make_strategy(),
            "plugins": [LightningEnvironment()],
        }

    def settings(self) -> tuple[object, ...]:
        """What decides about a trace, for keys of caches."""
        strategy = self.make_strategy()
        return type(strategy), strategy, self.world_size, self.rank, self.ranks_per_machine


def own_rank(module: Any) -> Ranks | None:
    """The one rank of a run under DDP on one device, whose buckets take memory as on several; else None."""
    if not is_alone_under_ddp(module):
        return None
    from lightning.pytorch.strategies import DDPStrategy

    return Ranks(partial(DDPStrategy, **module._trainer.strategy._ddp_kwargs), 1)


def is_alone_under_ddp(module: Any) -> bool:
    """Whether the Trainer that a module belongs to runs DDP on one device."""
    strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
    if strategy is None:
        return False
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    is_ddp = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)  # one by inheritance
    return is_ddp and strategy.num_processes * strategy.num_nodes == 1


@contextmanager
def process_group_of(ranks: Ranks | None) -> Iterator[None]:
    """Be a rank of a run: its process group exists here, and is gone afterwards. None is for a run of one process."""
    if ranks is None:
        yield
        return
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before: int = rank_zero_only.rank  # type: ignore[attr-defined]
    node, local = divmod(ranks.rank, ranks.ranks_per_machine or ranks.world_size)
    _forget_meshes()
    try:
        torch.distributed.init_process_group("fake", rank=ranks.rank, world_size=ranks.world_size, store=FakeStore())
        # Lightning takes processes in which it finds these for launched, and starts none.
        os.environ.update(NODE_RANK=str(node), LOCAL_RANK=str(local))
        with _as_on_a_rank():
            yield
    finally:
        # Strategies have told Lightning their rank, and what only the first may print would stay unsaid.
        rank_zero_only.rank = before  # type: ignore[attr-defined]
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        _forget_meshes()


@contextmanager
def _as_on_a_rank() -> Iterator[None]:
    """Replace what a process group without other processes, or a tensor without memory, can't run."""
    from lightning.pytorch.strategies import ddp
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    @functools.wraps(find_shapes)
    def unseen(propagator: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return find_shapes(propagator, schema)

    with ExitStack() as stack:
        stack.enter_context(replaced(ddp, "DistributedDataParallel", TracedDataParallel))
        # Ranks other than the sender would read what they have not been sent. All have the same objects.
        stack.enter_context(replaced(torch.distributed, "broadcast_object_list", lambda *_, **__: None))
        # DTensor finds shapes of results on fakes of its own, as in a real run, unseen by other modes.
        stack.enter_context(replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        if find_spec("torch.distributed._meta_registrations") is not None:  # older versions have none
            from torch.distributed import _meta_registrations

            # Collectives on fakes are numbered in turn: torch draws each number from Python's generator, the step's.
            count = itertools.count(1).__next__
            stack.enter_context(replaced(_meta_registrations, "generate_unique_id", count))
        yield


@contextmanager
def without_barriers() -> Iterator[None]:
    """Let Lightning go on after `prepare_data`, where it waits for other ranks over a gloo group that all of them make.

    A rank that traces may be the only one that does, and a group of torch's `fake` backend has no others.
    """
    from lightning.pytorch.trainer.connectors import data_connector

    with replaced(data_connector, "_InfiniteBarrier", nullcontext):
        yield


def _forget_meshes() -> None:
    """Empty caches of DTensor, whose results name groups: a mesh of the same shape would find those of another."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


class TracedDataParallel(DistributedDataParallel):
    """Stand-in for torch's `DistributedDataParallel`: memory of its buckets, made and used at the same moments.

    torch's own keeps its buckets in C++ (`reducer.cpp`), which reads the memory of tensors, and fakes have none. As
    there, gradients are copied into buckets while backward computes them, and are views of these
    (`gradient_as_bucket_view`) or keep their own memory. Before the second step's forward pass the buckets are made
    anew, one by one, and an old one is freed when the last of its gradients has been moved.

    Here each parameter has its part of a bucket as a tensor of its own, so that blocks can be told apart; all parts
    together take what the buckets take. The moment of a bucket too many is in every step, so that all steps are alike.
    Other arguments of torch's change nothing about memory.
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
