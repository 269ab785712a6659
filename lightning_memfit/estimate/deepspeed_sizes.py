"""The buffer sizes that our strategies set in DeepSpeed's configuration, from the shapes of a model.

DeepSpeed's defaults suit models of a trillion parameters, and Lightning's one sub-group for everything defeats
offloading. `zero_sizes` is for states in memory, `infinity_sizes` for states on disk. Written for DeepSpeed 0.19.8:
`runtime/zero/stage3.py` (sub-groups, `reserve_partitioned_swap_space`) and `runtime/swap_tensor` (buffers, alignment,
the smallest size that is swapped). Sizes are in elements unless the name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_memfit.memory import MIB

if TYPE_CHECKING:
    from torch import nn

MIN_SWAPPED_BYTES = MIB
"""`MIN_AIO_BYTES`: smaller tensors stay in memory, and so do those below one aio block."""

_ALIGNED_BYTES = 1024  # AIO_ALIGNED_BYTES, per aio thread
_WORTH_READING = 1 << 25  # elements: 128 MiB of fp32 per file keep any drive at its full rate
_MASTER_BYTES = 4

_SMALLEST = 2**20
_LARGEST_BUCKET = 200_000_000  # Lightning's default
_LARGEST_SUB_GROUP = 100_000_000
_PARTS = 16


# --- states in memory -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSizes:
    """Elements of a model's parameters, counted over all ranks.

    Attributes:
        total: All parameters.
        largest: The largest single parameter.
    """

    total: int
    largest: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> ModelSizes:
        """Count parameters; those that ZeRO-3 has partitioned count at their full size.

        Raises:
            ValueError: If there are none.
        """
        counts = [int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters]
        if not counts:
            raise ValueError("The module has no parameters to train.")
        return cls(sum(counts), max(counts))


def zero_sizes(zero: dict[str, Any], model: ModelSizes, world_size: int) -> dict[str, Any]:
    """Return the `zero_optimization` section with sizes, in elements, added where it has none.

    - Buckets hold the largest parameter, so that none needs a bucket of its own, up to Lightning's 2e8. Their
      elements are even: DeepSpeed aligns what ranks gather.
    - A stage-3 rank updates its parameters in sixteen sub-groups. Each makes fp32 copies of its gradients: with
      Lightning's 1e12 (one group) these are as large as a second model.
    - Stage 3 keeps at most a quarter of the model gathered; DeepSpeed's 1e9 would keep all of most models.

    Args:
        zero: The section.
        model: Sizes of the model.
        world_size: Number of ranks the parameters are divided among.
    """
    bucket = _within(_SMALLEST, model.largest + model.largest % 2, _LARGEST_BUCKET)
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero["stage"] == 3:
        live = max(2 * model.largest, model.total // 4, _SMALLEST)
        sizes |= {
            "sub_group_size": _within(_SMALLEST, -(-model.total // (world_size * _PARTS)), _LARGEST_SUB_GROUP),
            "stage3_prefetch_bucket_size": min(bucket, live // 2),
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    return sizes | zero


def _within(low: int, value: int, high: int) -> int:
    return max(low, min(value, high))


# --- states on disk -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AioSettings:
    """The part of DeepSpeed's `aio` section that sizes depend on. `nvme.tuning` finds the fastest for a folder."""

    block_size: int = MIB
    """Bytes of one request. Tensors below it are never swapped."""
    queue_depth: int = 8
    """Requests in flight per thread."""
    intra_op_parallelism: int = 1
    """Threads that share one tensor. (`thread_count`, which many examples set, is ignored.)"""

    @property
    def min_swapped_bytes(self) -> int:
        """Tensors below this stay in memory."""
        return max(MIN_SWAPPED_BYTES, self.block_size)

    def aligned(self, numel: int, itemsize: int) -> int:
        """Elements that `numel` take in a buffer and in a file."""
        step = _ALIGNED_BYTES * self.intra_op_parallelism // itemsize
        return -(-numel // step) * step

    def config(self) -> dict[str, Any]:
        """The `aio` section of a DeepSpeed configuration."""
        return {
            "block_size": self.block_size,
            "queue_depth": self.queue_depth,
            "intra_op_parallelism": self.intra_op_parallelism,
            "single_submit": False,
            "overlap_events": True,
        }


@dataclass(frozen=True)
class InfinitySizes:
    """Sizes of the `zero_optimization` section; `config` renders it."""

    aio: AioSettings
    itemsize: int
    """Bytes per element of the weights: 2 with bf16, 4 with fp32."""
    sub_group_size: int
    """Elements from which a sub-group, which is stepped at once, is complete."""
    sub_groups: tuple[int, ...]
    """Elements of every sub-group that results."""
    optimizer_buffer_count: int
    param_buffer_count: int
    param_buffer_size: int
    """0 where no parameter is large enough to be swapped."""
    max_in_cpu: int
    """Elements of parameters that stay in host memory."""
    write_buffer_size: int
    """Elements of the buffer through which a stepped sub-group's weights are written. By an oversight in
    `reserve_partitioned_swap_space` it holds whole parameters, though a rank writes only its share."""

    @property
    def largest_sub_group(self) -> int:
        """Elements stepped at once."""
        return max(self.sub_groups)

    @property
    def param_buffer_bytes(self) -> int:
        """Pinned memory for swapping parameters: the pool, and the buffer for writing a stepped sub-group."""
        pool = self.param_buffer_count * self.aio.aligned(self.param_buffer_size, self.itemsize)
        return (pool + self.write_buffer_size) * self.itemsize

    @property
    def optimizer_buffer_bytes(self) -> int:
        """Pinned memory for swapping optimizer states, `buffer_count` times the largest sub-group in fp32."""
        return self.optimizer_buffer_count * self.aio.aligned(self.largest_sub_group, _MASTER_BYTES) * _MASTER_BYTES

    def config(self, nvme_path: str, optimizer: bool = True, parameters: bool = True) -> dict[str, Any]:
        """DeepSpeed's configuration: the sections `zero_optimization` and `aio`.

        Swapped parameters are neither prefetched nor kept for reuse: DeepSpeed 0.19.8 would queue one twice, or run
        out of buffers, and stop.

        Args:
            nvme_path: The run's folder.
            optimizer: Whether optimizer states go to disk.
            parameters: Whether parameters do.
        """
        zero: dict[str, Any] = {"stage": 3, "sub_group_size": self.sub_group_size}
        if optimizer:
            zero["offload_optimizer"] = {
                "device": "nvme",
                "nvme_path": nvme_path,
                "buffer_count": self.optimizer_buffer_count,
            }
        if parameters:
            zero["offload_param"] = {
                "device": "nvme",
                "nvme_path": nvme_path,
                "buffer_count": self.param_buffer_count,
                "buffer_size": max(1, self.param_buffer_size),
                "max_in_cpu": self.max_in_cpu,
            }
            zero |= {
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_max_live_parameters": 0,
            }
        return {"zero_optimization": zero, "aio": self.aio.config()}


def infinity_sizes(
    groups: Sequence[Sequence[int]],
    world_size: int = 1,
    itemsize: int = 2,
    aio: AioSettings | None = None,
    num_states: int = 2,
    pipeline_read: bool = False,
    pipeline_write: bool = False,
    params_per_module: int = 1,
    max_in_cpu: int = 0,
) -> InfinitySizes:
    """Choose sizes for a model: as little pinned memory as its largest parameter allows.

    Args:
        groups: Elements of the trained parameters, whole, by optimizer parameter group and in its order.
        world_size: Ranks that share every parameter.
        itemsize: Bytes per element of the weights.
        aio: Settings of asynchronous I/O; DeepSpeed's defaults if not given.
        num_states: State tensors of the optimizer, 2 for Adam.
        pipeline_read: Whether the next sub-group is read while one is stepped.
        pipeline_write: Whether the previous sub-group is written while one is stepped.
        params_per_module: Large parameters that one module owns itself.
        max_in_cpu: Elements of parameters to keep in host memory instead.

    Raises:
        ValueError: If there is no parameter.
    """
    if not any(groups):
        raise ValueError("`groups` holds no parameter. Pass the elements of what the optimizer trains.")
    aio = aio or AioSettings()
    partitions = [[-(-numel // world_size) for numel in group] for group in groups]
    size = choose_sub_group_size(partitions)
    groups_by_params = [sub for group in partitions for sub in sub_groups(group, size)]
    totals = tuple(sum(sub) for sub in groups_by_params)
    swapped = [p for group in partitions for p in group if p * itemsize >= aio.min_swapped_bytes]
    whole = _whole_of_fullest(groups, partitions, size)
    return InfinitySizes(
        aio=aio,
        itemsize=itemsize,
        sub_group_size=size,
        sub_groups=totals,
        optimizer_buffer_count=optimizer_buffer_count(num_states, pipeline_read, pipeline_write),
        param_buffer_count=param_buffer_count(params_per_module),
        param_buffer_size=max(swapped, default=0),
        max_in_cpu=max_in_cpu,
        write_buffer_size=sum(aio.aligned(numel, itemsize) for numel in whole),
    )


def _whole_of_fullest(groups: Sequence[Sequence[int]], partitions: Sequence[Sequence[int]], size: int) -> list[int]:
    """Elements of the whole parameters in the largest sub-group, the first of several equal ones."""
    best: list[int] = []
    largest = 0
    for whole, shares in zip(groups, partitions, strict=True):
        start = 0
        for sub in sub_groups(shares, size):
            if sum(sub) > largest:
                largest, best = sum(sub), list(whole[start : start + len(sub)])
            start += len(sub)
    return best


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
    smaller than the largest parameter; fewer, larger sub-groups mean longer reads. The default of 1e12 makes one
    sub-group of each parameter group, which brings the whole model into memory.

    Args:
        groups: Elements of this rank's partitions, by optimizer parameter group and in its order.
    """
    allowed = max(max(numel for group in groups for numel in group), _WORTH_READING)
    sizes = {numel for group in groups for numel in group if numel <= allowed}
    for size in sorted({allowed - numel + 1 for numel in sizes} | {allowed}, reverse=True):
        if all(sum(sub) <= allowed for group in groups if group for sub in sub_groups(group, size)):
            return size
    return 1


def optimizer_buffer_count(num_states: int = 2, pipeline_read: bool = False, pipeline_write: bool = False) -> int:
    """Buffers for optimizer states: master weights, gradient and each state, once per sub-group that is in flight.

    Args:
        num_states: State tensors of the optimizer, 2 for Adam.
        pipeline_read: Whether the next sub-group is read while one is stepped.
        pipeline_write: Whether the previous sub-group is written while one is stepped.
    """
    return (2 + num_states) * (1 + pipeline_read + pipeline_write)


def param_buffer_count(params_per_module: int) -> int:
    """Buffers for parameters: those of the running module, as many for the next or a tied one, and one in reserve."""
    return 2 * params_per_module + 3


def tiling_splits(shape: Sequence[int], max_numel: int) -> tuple[int, int] | None:
    """Number of tiles (rows, columns) that cut a weight into tiles of at most `max_numel` elements.

    For `deepspeed.zero.TiledLinear(in_splits, out_splits)`, ZeRO-Infinity's memory-centric tiling (Rajbhandari et al.
    2021, section 5.1.3): tiles are fetched and released one after the other.

    Args:
        shape: Shape of the weight, in two dimensions.
        max_numel: Elements of a buffer, or elements that the device has room for.

    Returns:
        The numbers, or None if the weight fits as it is.

    Raises:
        ValueError: If `max_numel` is not positive or the weight does not have two dimensions.
    """
    if max_numel < 1 or len(shape) != 2:
        raise ValueError(f"`max_numel={max_numel}`, `shape={tuple(shape)}`: a tile of a matrix has at least 1 element.")
    rows, columns = shape
    if rows * columns <= max_numel:
        return None
    row_splits = min(rows, math.ceil(rows * columns / max_numel))
    tile_rows = -(-rows // row_splits)
    return row_splits, math.ceil(columns / max(1, max_numel // tile_rows))


def tiling_hints(shapes: Mapping[str, Sequence[int]], max_numel: int) -> list[str]:
    """One sentence for every matrix that does not fit in `max_numel` elements, with the tiles that do."""
    hints = []
    for name, shape in shapes.items():
        splits = tiling_splits(shape, max_numel) if len(shape) == 2 else None
        if splits is not None:
            rows, columns = splits
            hints.append(
                f"{name} ({shape[0]} x {shape[1]}) has more than {max_numel} elements: replace it by "
                f"deepspeed.zero.TiledLinear with {rows} x {columns} tiles."
            )
    return hints


def params_in_host(available_bytes: int, itemsize: int) -> int:
    """`max_in_cpu` for partial offload of parameters: elements of parameters that fit in this much host memory.

    They are read from memory instead of disk. DeepSpeed's `ratio` is no alternative: it steps a part of the sub-groups
    on the accelerator, which is impossible when their states are on disk.
    """
    return max(0, available_bytes) // itemsize
