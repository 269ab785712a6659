"""Whatever a batch is made of: its parts, put together again, are the batch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_memfit.fitting.step.split import BatchSplitter, sizes_of


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any = None


def fields(count: int) -> st.SearchStrategy[Any]:
    """What has one entry per sample: tensors and arrays of any further shape, lists of strings."""
    shapes = st.lists(st.integers(0, 3), max_size=2).map(lambda rest: (count, *rest))
    return st.one_of(
        shapes.map(numbered),
        shapes.map(lambda shape: numbered(shape).numpy()),
        st.just([f"sample {index}" for index in range(count)]),
    )


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(int(numpy.prod(shape)), dtype=torch.float32).reshape(shape)


def wholes(count: int) -> st.SearchStrategy[Any]:
    """What every part gets whole: `count` is no first dimension of it."""
    tensors = st.sampled_from([(), (count + 1,), (count + 2, count)]).map(torch.ones)
    return st.one_of(tensors, st.none(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=3))


def containers(children: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[Any]:
    # As many entries as samples could be one entry per sample: tests of `BatchSplitter.count` show how that is told.
    sequences = st.lists(children, min_size=1, max_size=3).filter(lambda items: len(items) != count)
    return st.one_of(
        st.dictionaries(st.sampled_from("abcd"), children, max_size=3),
        sequences,
        sequences.map(tuple),
        st.builds(Pair, children, children),
        st.builds(Record, children, children),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, list[int]]:
    """A batch and the sizes to split it into."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    count = sum(sizes)
    leaves = st.one_of(fields(count), wholes(count))
    nested = st.recursive(leaves, lambda children: containers(children, count), max_leaves=5)
    return {"field": draw(fields(count)), "rest": draw(nested)}, sizes


def joined(parts: list[Any], count: int, whole: Any) -> Any:
    """Put parts together; `whole` tells which leaves were split."""
    first = parts[0]
    assert all(type(part) is type(first) is type(whole) for part in parts)
    if isinstance(whole, Tensor):
        return torch.cat(parts) if whole.ndim and len(whole) == count else same(parts)
    if isinstance(whole, numpy.ndarray):
        return numpy.concatenate(parts)
    if isinstance(whole, dict):
        assert all(list(part) == list(whole) for part in parts)
        return {key: joined([part[key] for part in parts], count, value) for key, value in whole.items()}
    if isinstance(whole, Record):
        return Record(*(joined([getattr(p, n) for p in parts], count, getattr(whole, n)) for n in ("x", "y")))
    if isinstance(whole, list) and whole and isinstance(whole[0], str) and len(whole) == count:
        return [item for part in parts for item in part]
    if isinstance(whole, (list, tuple)):
        columns = [joined([part[i] for part in parts], count, item) for i, item in enumerate(whole)]
        return Pair(*columns) if isinstance(whole, Pair) else type(whole)(columns)
    return same(parts)


def same(parts: list[Any]) -> Any:
    assert all(part is parts[0] for part in parts)
    return parts[0]


def equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, numpy.ndarray):
        return numpy.array_equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, Record):
        return equal(first.x, second.x) and equal(first.y, second.y)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


@given(batches())
def test_parts_put_together_are_the_batch(case: tuple[Any, list[int]]) -> None:
    batch, sizes = case
    parts = BatchSplitter().split(batch, sizes)
    assert [len(part["field"]) for part in parts] == sizes
    assert equal(joined(parts, sum(sizes), batch), batch)


@given(batches())
def test_the_samples_of_a_batch_are_counted_where_the_loader_says_its_size(case: tuple[Any, list[int]]) -> None:
    batch, sizes = case
    assert BatchSplitter(expected=sum(sizes)).count(batch) == sum(sizes)


@given(st.integers(1, 300), st.integers(1, 300))
def test_sizes_add_up_and_no_sample_is_left_alone(num_samples: int, micro_batch_size: int) -> None:
    sizes = sizes_of(num_samples, micro_batch_size)
    assert sum(sizes) == num_samples
    assert len(sizes) == -(-num_samples // micro_batch_size)
    assert set(sizes[:-2]) <= {micro_batch_size}
    assert 1 <= min(sizes) <= max(sizes) <= micro_batch_size
    assert 1 not in sizes or micro_batch_size < 3 or num_samples == 1
