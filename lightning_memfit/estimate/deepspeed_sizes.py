"""The buffer sizes that our strategies set in DeepSpeed's configuration, from the shapes of a model.

DeepSpeed's defaults suit models of a trillion parameters, and Lightning's one sub-group for everything defeats
offloading. `zero_sizes` is for states in memory, `infinity_sizes` for states on disk. Written for DeepSpeed 0.19.8:
`runtime/zero/stage3.py` (sub-groups) and `runtime/swap_tensor` (buffers, alignment, the smallest size that is swapped).
Sizes are in elements unless the name says bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memfit.memory import MIB
from lightning_memfit.memory.parameters import ParameterInfo

_ALIGNED_BYTES = 1024  # AIO_ALIGNED_BYTES, per aio thread
_WORTH_READING = 1 << 25  # elements: 128 MiB of fp32 per file keep any drive at its full rate
_SMALLEST = 2**20
_LARGEST_BUCKET = 200_000_000  # Lightning's default
_LARGEST_SUB_GROUP = 100_000_000
_PARTS = 16
_OPTIMIZER_BUFFERS = 4  # master weights, gradient and Adam's two states


# --- states in memory -----------------------------------------------------------------------------------------------


def zero_sizes(zero: dict[str, Any], numels: Sequence[int], world_size: int) -> dict[str, Any]:
    """Return the `zero_optimization` section with sizes, in elements, added where it has none.

    - Buckets hold the largest parameter, so that none needs a bucket of its own, up to Lightning's 2e8. Their
      elements are even: DeepSpeed aligns what ranks gather.
    - A stage-3 rank updates its parameters in sixteen sub-groups. Each makes fp32 copies of its gradients: with
      Lightning's 1e12 (one group) these are as large as a second model.
    - Stage 3 keeps at most a quarter of the model gathered; DeepSpeed's 1e9 would keep all of most models.
    """
    total, largest = sum(numels), max(numels, default=0)
    bucket = max(_SMALLEST, min(largest + largest % 2, _LARGEST_BUCKET))
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero["stage"] == 3:
        live = max(2 * largest, total // 4, _SMALLEST)
        sizes |= {
            "sub_group_size": max(_SMALLEST, min(-(-total // (world_size * _PARTS)), _LARGEST_SUB_GROUP)),
            "stage3_prefetch_bucket_size": min(bucket, live // 2),
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    return sizes | zero


# --- states on disk -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AioSettings:
    """The part of DeepSpeed's `aio` section that sizes depend on, with its defaults: others are no faster."""

    block_size: int = MIB
    """Bytes of one request. Tensors below it are never swapped."""
    queue_depth: int = 8
    """Requests in flight per thread."""
    intra_op_parallelism: int = 1
    """Threads that share one tensor. (`thread_count`, which many examples set, is ignored.)"""

    @property
    def min_swapped_bytes(self) -> int:
        """Tensors below this stay in memory: `MIN_AIO_BYTES`, or one aio block."""
        return max(MIB, self.block_size)

    def aligned(self, numel: int, itemsize: int) -> int:
        """Elements that `numel` take in a buffer and in a file."""
        step = _ALIGNED_BYTES * self.intra_op_parallelism // itemsize
        return -(-numel // step) * step

    def config(self) -> dict[str, Any]:
        """The `aio` section of a DeepSpeed configuration."""
        sizes = {name: getattr(self, name) for name in ("block_size", "queue_depth", "intra_op_parallelism")}
        return {**sizes, "single_submit": False, "overlap_events": True}


@dataclass(frozen=True)
class InfinitySizes:
    """Sizes of the `zero_optimization` section; `config` renders it."""

    aio: AioSettings
    world_size: int
    itemsize: int
    """Bytes per element of the weights: 2 with bf16, 4 with fp32."""
    sub_group_size: int
    """Elements from which a sub-group, which is stepped at once, is complete."""
    sub_groups: tuple[int, ...]
    """Elements of every sub-group that results."""
    param_buffer_count: int
    """Parameters of the running module, as many for the next or a tied one, and one in reserve."""
    param_buffer_size: int
    """0 where no parameter is large enough to be swapped."""
    max_in_cpu: int
    """Elements of parameters that stay in host memory."""

    @property
    def largest_sub_group(self) -> int:
        """Elements stepped at once."""
        return max(self.sub_groups)

    @property
    def param_buffer_bytes(self) -> int:
        """Pinned memory for swapping parameters: the pool, and the buffer for writing a stepped sub-group.

        By an oversight in `reserve_partitioned_swap_space` that holds whole parameters, though a rank writes its share.
        """
        pool = self.param_buffer_count * self.aio.aligned(self.param_buffer_size, self.itemsize)
        return (pool + self.world_size * self.largest_sub_group) * self.itemsize

    @property
    def optimizer_buffer_bytes(self) -> int:
        """Pinned memory for swapping optimizer states, `buffer_count` times the largest sub-group in fp32."""
        return 4 * _OPTIMIZER_BUFFERS * self.aio.aligned(self.largest_sub_group, 4)

    def config(self, nvme_path: str, optimizer: bool = True, parameters: bool = True) -> dict[str, Any]:
        """DeepSpeed's configuration: the sections `zero_optimization` and `aio`.

        Swapped parameters are neither prefetched nor kept for reuse: DeepSpeed 0.19.8 would queue one twice, or run
        out of buffers, and stop.
        """
        zero: dict[str, Any] = {"stage": 3, "sub_group_size": self.sub_group_size}
        drive = {"device": "nvme", "nvme_path": nvme_path}
        if optimizer:
            zero["offload_optimizer"] = {**drive, "buffer_count": _OPTIMIZER_BUFFERS}
        if parameters:
            pool = {"buffer_count": self.param_buffer_count, "buffer_size": max(1, self.param_buffer_size)}
            zero["offload_param"] = {**drive, **pool, "max_in_cpu": self.max_in_cpu}
            ahead = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance", "stage3_max_live_parameters")
            zero |= dict.fromkeys(ahead, 0)
        return {"zero_optimization": zero, "aio": self.aio.config()}


def infinity_sizes(
    groups: Sequence[Sequence[int]],
    world_size: int = 1,
    itemsize: int = 2,
    aio: AioSettings | None = None,
    params_per_module: int = 1,
    max_in_cpu: int = 0,
) -> InfinitySizes:
    """Choose sizes for a model: as little pinned memory as its largest parameter allows.

    Raises:
        ValueError: If there is no parameter.
    """
    if not any(groups):
        raise ValueError("`groups` holds no parameter. Pass the elements of what the optimizer trains.")
    aio = aio or AioSettings()
    partitions = [[-(-numel // world_size) for numel in group] for group in groups]
    size = choose_sub_group_size(partitions)
    swapped = [p for group in partitions for p in group if p * itemsize >= aio.min_swapped_bytes]
    return InfinitySizes(
        aio,
        world_size,
        itemsize,
        size,
        tuple(sum(sub) for group in partitions for sub in sub_groups(group, size)),
        param_buffer_count=2 * params_per_module + 3,
        param_buffer_size=max(swapped, default=0),
        max_in_cpu=max_in_cpu,
    )


def most_per_module(parameters: Sequence[ParameterInfo], min_numel: int) -> int:
    """Largest number of parameters of at least `min_numel` elements that one module owns itself."""
    owners = Counter(p.name.rpartition(".")[0] for p in parameters if p.numel >= min_numel)
    return max(owners.values(), default=0)


def sub_groups(partitions: Sequence[int], size: int) -> list[list[int]]:
    """The sub-groups DeepSpeed makes of one optimizer parameter group: parameters in order, until `size` is reached.

    A sub-group is therefore smaller than `size` plus its last parameter (`stage3.py`, `_create_fp16_sub_groups`).
    """
    if size >= sum(partitions):
        return [list(partitions)]
    found: list[list[int]] = [[]]
    for numel in partitions:
        if sum(found[-1]) >= size:
            found.append([])
        found[-1].append(numel)
    return found


def choose_sub_group_size(groups: Sequence[Sequence[int]]) -> int:
    """The largest `sub_group_size` whose sub-groups all stay within the largest parameter, or 128 MiB of fp32.

    Pinned memory and the step's scratch memory are multiples of the largest sub-group, and no setting makes that
    smaller than the largest parameter; fewer, larger sub-groups mean longer reads.
    """
    allowed = max(max(numel for group in groups for numel in group), _WORTH_READING)
    sizes = {allowed - numel + 1 for group in groups for numel in group if numel <= allowed} | {allowed}
    for size in sorted(sizes, reverse=True):
        if all(sum(sub) <= allowed for group in groups if group for sub in sub_groups(group, size)):
            return size
    return 1
