"""Memory that CUDA kernels take from the caching allocator while they run, beyond their results, by torch's own rules.

Three kinds matter beside activations: buffers through which blocks of threads add up a tensor's rows, as for the
gradient of a bias, the float32 gradient of queries in the backward of fused attention, and what unfused attention makes
of its scores. The first two agree to the byte with what was allocated in runs of GPT-2 and BERT on an H200 (torch
2.11). Other kernels count as taking nothing.
"""

from collections.abc import Callable
from typing import Any

import torch

from lightning_memfit.profile.dispatch import is_deterministic
from lightning_memfit.profile.events import BOUNDED_SCRATCH_SITE, SCRATCH_SITE

aten = torch.ops.aten

_MULTIPROCESSORS = {(7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148}
"""Of the largest card of a compute capability: smaller ones take less where this bounds the number of blocks."""
_MOST_MULTIPROCESSORS = 188
_THREADS = {7: {0: 2048, 5: 1024}, 8: {0: 2048}, 9: {0: 2048}, 10: {0: 2048}}
"""Most threads of a multiprocessor, by major and minor capability; 1536 elsewhere."""


def scratch(func: Any, args: Any, result: Any, capability: tuple[int, int]) -> tuple[str, tuple[int, ...]] | None:
    """What a CUDA kernel takes and gives back: the site of its buffers and the bytes of each; None if none is known.

    Buffers that are there at a time come one after the other, largest last; the others are small.
    """
    if func is aten.sum.dim_IntList:
        return BOUNDED_SCRATCH_SITE, (row_sum_bytes(args[0], args[1], result, capability),)
    if func is _SAFE_SOFTMAX:
        return SCRATCH_SITE, (safe_softmax_bytes(result),)
    rule = _ATTENTION.get(func)
    return None if rule is None else (SCRATCH_SITE, rule(capability, *args[:3]))


# --- sums of rows -----------------------------------------------------------------------------------------------------


def row_sum_bytes(
    tensor: torch.Tensor, dims: list[int] | None, result: torch.Tensor, capability: tuple[int, int]
) -> int:
    """Buffer of the blocks of threads that add up the outer dimensions of a contiguous tensor.

    By `setReduceConfig` and `ReduceConfig::global_memory_size` in torch's `aten/src/ATen/native/cuda/Reduce.cuh`. Other
    reductions combine a few scalars: 0.
    """
    kept = tensor.dim() - len(dims or range(tensor.dim()))
    is_outer = dims is not None and sorted(dim % tensor.dim() for dim in dims) == list(range(len(dims)))
    if not is_outer or kept < 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
        return 0
    num_outputs = result.numel()
    num_rows = tensor.numel() // max(1, num_outputs)
    return _global_memory(num_rows, num_outputs, max(4, result.element_size()), capability)


def _global_memory(num_rows: int, num_outputs: int, itemsize: int, capability: tuple[int, int]) -> int:
    if not num_rows or not num_outputs:
        return 0
    vector = next(size for size in (4, 2, 1) if num_outputs % size == 0)  # outputs of a thread
    most = 512 // vector
    columns, rows = _power_of_two(num_outputs // vector, most), _power_of_two(num_rows, most)
    width = min(columns, 32)
    height = min(rows, most // width)
    width = min(columns, most // height)
    if num_rows < min(16 * height, 256):
        return 0  # each row of a block has outputs of its own
    values = -(-num_rows // height)  # that a thread adds up
    grid = -(-(num_outputs // vector) // width)
    most_blocks = _multiprocessors(capability) * (_most_threads(capability) // (width * height))
    if values < 256 or grid > most_blocks:
        return 0
    blocks = max(min(-(-most_blocks // grid), -(-values // 16)), -(-values // 256))
    return itemsize * num_outputs * blocks * width * vector if blocks > 1 else 0


def _power_of_two(number: int, most: int) -> int:
    """Largest power of two that is no larger than a number."""
    return most if number >= most else 1 << (max(1, number).bit_length() - 1)


def _multiprocessors(capability: tuple[int, int]) -> int:
    return _MULTIPROCESSORS.get(capability, _MOST_MULTIPROCESSORS)


def _most_threads(capability: tuple[int, int]) -> int:
    return _THREADS.get(capability[0], {}).get(capability[1], 1536)


# --- attention without a fused kernel ---------------------------------------------------------------------------------

_SAFE_SOFTMAX = getattr(getattr(aten, "_safe_softmax", None), "default", object())  # torch 2.5


def safe_softmax_bytes(result: torch.Tensor) -> int:
    """A softmax as large as the result, and which scores are masked (`_safe_softmax` in torch's `attention.cpp`)."""
    return result.nbytes + result.numel()


# --- backward of fused attention --------------------------------------------------------------------------------------


def _flash(
    capability: tuple[int, int], gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[int, ...]:
    """`softmax_d`, and `dq_accum`, `dk_expanded` and `dv_expanded` of `mha_bwd` in torch's `flash_attn/flash_api.cpp`.

    With fewer heads of keys and values, each head of the queries has gradients of them, which are added up afterwards.
    Where it must be deterministic, blocks of threads add up the gradient of queries in buffers of their own, as many as
    there are multiprocessors for a head, rounded up. That is no straight line over the batch, as sizes have to be: what
    is counted is the lowest line above it, which is too high by less than a head's buffer for every multiprocessor.
    """
    batch, heads, _, head = query.shape
    softmax, sums = _flash_sums(query)
    if is_deterministic():
        sums += sums // max(1, batch * heads) * (_multiprocessors(capability) - 1)
    expanded = 0 if key.size(1) == heads else 2 * batch * key.size(2) * heads * head * key.element_size()
    return softmax, sums + expanded


def _flash_sums(query: torch.Tensor) -> tuple[int, int]:
    batch, heads, length, head = query.shape
    rounded_length = -(-length // 128) * 128
    rounded_head = -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
    return 4 * batch * heads * rounded_length, 4 * batch * heads * rounded_length * rounded_head


def _cudnn(
    capability: tuple[int, int], gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[int, ...]:
    """The sums of flash attention in one workspace, as seen of cuDNN 9 with as many heads of keys as of queries."""
    return (sum(_flash_sums(query)),)


def _efficient(
    capability: tuple[int, int], gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[int, ...]:
    """`delta` and `workspace` of `_efficient_attention_backward` in torch's `transformers/cuda/attention_backward.cu`.

    The kernel adds up the gradient of queries in tiles of 64 rows, each with 16 bytes for a lock and a counter. In
    float32 `delta` is made of a product as large as the output.
    """
    batch, heads, length, head = query.shape
    delta = 4 * batch * heads * length
    columns = 64 if head <= 64 else -(-head // 128) * 128
    workspace = batch * heads * 2 * -(-length // 128) * (16 + 4 * 64 * columns)
    product = (4 * query.numel(),) if query.dtype is torch.float32 else ()
    return (*product, delta, workspace)


_ATTENTION: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient,
}
