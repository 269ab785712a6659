import itertools

import pytest
import torch

from lightning_memfit.memory import MIB, Category
from lightning_memfit.profile.cuda_scratch import row_sum_bytes, scratch
from lightning_memfit.profile.events import BOUNDED_SCRATCH_SITE, CATEGORIES
from lightning_memfit.profile.recorder import EventRecorder

aten = torch.ops.aten
H200 = (9, 0)
BF16, FULL = torch.bfloat16, torch.float32


def summed(rows, columns, dtype=FULL, dims=(0,), capability=H200):
    x = torch.empty(rows, columns, dtype=dtype, device="meta")
    return row_sum_bytes(x, list(dims), x.sum(dims), capability)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "size_bytes"),
    [
        (4096, 1600, FULL, 52_428_800),
        (4096, 4800, FULL, 137_625_600),
        (4096, 6400, FULL, 140_902_400),
        (16 * 257, 1280, FULL, 42_598_400),
        (16 * 257, 5120, FULL, 138_936_320),
        (8192, 768, BF16, 50_331_648),
        (8192, 2304, BF16, 139_198_464),
        (8192, 3072, BF16, 138_412_032),
        (4096, 4096, BF16, 128 * MIB),
    ],
)
def test_sums_of_rows_take_what_an_h200_allocated(rows, columns, dtype, size_bytes):
    assert summed(rows, columns, dtype) == size_bytes


def test_other_sums_combine_scalars():
    assert summed(4096, 1600, dims=(1,)) == 0
    assert summed(4096, 1600, dims=(0, 1)) == 0
    assert summed(64, 1600) == 0  # too few rows to share
    assert summed(0, 1600) == summed(4096, 0) == 0
    x = torch.empty(4096, 1600, device="meta").t().contiguous().t()
    assert row_sum_bytes(x, [0], x.sum(0), H200) == 0


def test_smaller_cards_share_sums_among_fewer_blocks():
    assert summed(8192, 3072, capability=(8, 0)) < summed(8192, 3072)
    assert summed(8192, 3072, capability=(99, 0)) >= summed(8192, 3072)


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "sizes"),
    [
        ("flash", (8, 12, 1024, 64), BF16, (393_216, 25_165_824)),
        ("cudnn", (8, 12, 1024, 64), BF16, (25_559_296,)),
        ("efficient", (8, 12, 1024, 64), BF16, (393_216, 25_190_400)),
        ("efficient", (4, 25, 1024, 64), FULL, (26_214_400, 409_600, 26_240_000)),
        ("efficient", (16, 16, 257, 80), FULL, (21_053_440, 263_168, 50_356_224)),
    ],
)
def test_backward_of_attention_takes_what_an_h200_allocated(kernel, shape, dtype, sizes):
    query = torch.empty(shape, dtype=dtype, device="meta")
    operator = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    assert scratch(operator, (query, query, query), None, H200)[1] == pytest.approx(sizes, abs=256)  # cuDNN aligns


FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default


@pytest.mark.parametrize(("heads", "keys"), [(12, 1024), (4, 1024), (4, 512)])
def test_flash_attention_expands_gradients_of_grouped_heads(heads, keys):
    """`mha_bwd` makes both in the type of the keys, for every head of the queries."""
    query = torch.empty(8, 12, 1024, 64, dtype=BF16, device="meta")
    key = torch.empty(8, heads, keys, 64, dtype=BF16, device="meta")
    expanded = 0 if heads == 12 else 2 * 8 * keys * 12 * 64 * 2
    assert scratch(FLASH_BACKWARD, (query, query, key), None, H200)[1] == (393_216, 25_165_824 + expanded)


def test_deterministic_flash_attention_adds_up_in_buffers_of_its_blocks():
    """An H200 has 132 multiprocessors, over which every head of every sample is split (`nsplits` in `mha_bwd`)."""
    of_head, counted = 4 * 1024 * 64, []
    torch.use_deterministic_algorithms(True)
    try:
        for batch in range(1, 33):
            query = torch.empty(batch, 12, 1024, 64, dtype=BF16, device="meta")
            counted.append(scratch(FLASH_BACKWARD, (query, query, query), None, H200)[1][-1])
    finally:
        torch.use_deterministic_algorithms(False)
    taken = [-(-132 // (12 * batch)) * 12 * batch * of_head for batch in range(1, 33)]
    assert all(0 <= more - exact < 132 * of_head for more, exact in zip(counted, taken, strict=True))
    assert {second - first for first, second in itertools.pairwise(counted)} == {12 * of_head}  # other sizes follow


@pytest.mark.skipif(not hasattr(aten, "_safe_softmax"), reason="came with torch 2.5")
def test_softmax_of_unfused_attention_is_made_twice():
    scores = torch.empty(2, 4, 16, 16, device="meta")
    found = scratch(aten._safe_softmax.default, (scores, -1), torch.empty_like(scores), H200)
    assert found[1] == (scores.numel() * (4 + 1),)


def test_scratch_is_written_down_and_given_back():
    x = torch.ones(4096, 1600)
    with EventRecorder(cuda=H200) as recorder:
        x.sum(0)
    events = recorder.result()
    assert events.sizes.tolist() == [6400, 52_428_800]
    assert events.events.tolist()[:3] == [1, 2, -2]
    assert CATEGORIES[events.categories[1]] is Category.TEMPORARY
    assert events.site_names[events.sites[1]].endswith(BOUNDED_SCRATCH_SITE)
