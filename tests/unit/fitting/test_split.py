from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_memfit.fitting.step.split import BatchSplitter, sizes_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count).reshape(count, *[1] * len(shape)).expand(count, *shape).contiguous()


def test_sizes() -> None:
    assert sizes_of(16, 16) == [16]
    assert sizes_of(10, 4) == [4, 4, 2]
    assert sizes_of(3, 8) == [3]


def test_any_nesting_is_split_and_the_rest_passed_whole() -> None:
    weights = torch.ones(3)
    batch = {
        "ids": rows(5, 7),
        "pair": Pair(rows(5), [rows(5, 2), {"deep": (rows(5),)}]),
        "record": Record(rows(5), "train"),
        "array": numpy.arange(5),
        "names": ["a", "b", "c", "d", "e"],
        "weights": weights,
        "scalar": torch.tensor(3.0),
        "flag": True,
        "nothing": None,
    }
    first, second = BatchSplitter().split(batch, [3, 2])
    assert first["ids"].shape == (3, 7)
    assert second["ids"][:, 0].tolist() == [3, 4]
    assert isinstance(first["pair"], Pair)
    assert second["pair"].y[1]["deep"][0].tolist() == [3, 4]
    assert second["record"] == Record(second["record"].x, "train")
    assert second["record"].x.tolist() == [3, 4]
    assert second["array"].tolist() == [3, 4]
    assert second["names"] == ["d", "e"]
    assert first["weights"] is weights
    assert first["flag"] is True
    assert batch["ids"].shape == (5, 7)


def test_splitting_does_not_copy() -> None:
    batch = rows(6, 4)
    part = BatchSplitter().split(batch, [2, 4])[1]
    assert part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


def test_batch_encoding_and_ordered_dict_keep_their_class() -> None:
    from transformers import BatchEncoding

    encoding = BatchEncoding({"input_ids": rows(4, 3), "attention_mask": torch.ones(4, 3)})
    parts = BatchSplitter().split(encoding, [3, 1])
    assert [type(part) for part in parts] == [BatchEncoding, BatchEncoding]
    assert parts[1].input_ids.tolist() == [[3, 3, 3]]
    assert parts[1].to("cpu")["attention_mask"].shape == (1, 3)
    assert isinstance(BatchSplitter().split(OrderedDict(x=rows(4)), [2, 2])[0], OrderedDict)


@pytest.mark.parametrize(
    ("batch", "expected", "count"),
    [
        (rows(4, 2), None, 4),
        ([rows(4, 2), rows(4)], None, 4),
        ({"x": rows(4), "class_weights": torch.ones(10)}, 4, 4),
        ([torch.zeros(3, 8, 8)] * 4, 4, 4),  # one image per sample
        (([torch.zeros(3, 8, 8)] * 4, [{"boxes": torch.zeros(2, 4)}] * 4), 4, 4),
        (["a", "b"], None, 2),
    ],
)
def test_count(batch: Any, expected: int | None, count: int) -> None:
    assert BatchSplitter().count(batch, expected) == count


def test_lists_of_samples_stay_lists_of_samples_in_a_ragged_batch() -> None:
    splitter = BatchSplitter()
    images = [torch.full((3, 8, 8), index) for index in range(4)]
    assert splitter.count(images, 4) == 4
    assert splitter.count(images[:3], 4) == 3
    parts = splitter.split(images[:3], [2, 1])
    assert [len(part) for part in parts] == [2, 1]
    assert parts[1][0] is images[2]


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first dimensions \[4, 10\].*split_batch"):
        BatchSplitter().count({"x": rows(4), "class_weights": torch.ones(10)})
    with pytest.raises(ValueError, match="`object` without tensors"):
        BatchSplitter().count(object())
    with pytest.raises(ValueError, match=r"contains a `object`.*split_batch"):
        BatchSplitter().split({"x": rows(4), "graph": object()}, [2, 2])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensor"):
        BatchSplitter().split({"x": nested}, [1, 1])


def test_hook_for_graphs() -> None:
    class Graphs(list):
        pass

    def split(batch: Any, sizes: list[int]) -> list[Any]:
        return [Graphs(batch[:1]), Graphs(batch[1:])] if len(sizes) > 1 else [batch]

    splitter = BatchSplitter(split, num_samples=len)
    assert splitter.count(Graphs("abc")) == 3
    assert splitter.split(Graphs("abc"), [1, 2]) == [["a"], ["b", "c"]]
    with pytest.raises(ValueError, match=r"returned 2 parts.*3 sizes"):
        splitter.split(Graphs("abc"), [1, 1, 1])
