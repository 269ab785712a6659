"""Cutting batches of any nesting, and what each part weighs in the loss."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_memfit.fitting.step.loss_weights import LossWeights
from lightning_memfit.fitting.step.split import (
    BatchGuard,
    BatchSplitter,
    tensors_of,
    versions,
    with_own_tensors,
)
from lightning_memfit.memory.host_copy import HostCopy

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count).reshape(count, *[1] * len(shape)).expand(count, *shape).contiguous()


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
    assert BatchSplitter(expected=expected).count(batch) == count


def test_lists_of_samples_stay_lists_of_samples_in_a_ragged_batch() -> None:
    splitter = BatchSplitter(expected=4)
    images = [torch.full((3, 8, 8), index) for index in range(4)]
    assert splitter.count(images) == 4
    assert splitter.count(images[:3]) == 3
    parts = splitter.split(images[:3], [2, 1])
    assert [len(part) for part in parts] == [2, 1]
    assert parts[1][0] is images[2]


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first dimensions \[4, 10\].*split_batch"):
        BatchSplitter().count({"x": rows(4), "class_weights": torch.ones(10)})
    with pytest.raises(ValueError, match="`object` without tensors"):
        BatchSplitter().count(object())
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensor"):
        BatchSplitter().split({"x": nested}, [1, 1])
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])  # which has no shape
    labels = {"x": strided, "y": torch.ones(2)}
    assert LossWeights().read(labels, 2).weight == 2


class Batched(UserDict[str, Tensor]):
    """Knows its batch dimension and takes no tensors without it, as a `TensorDict`."""

    def __init__(self, items: dict[str, Tensor], batch_size: torch.Size) -> None:
        self.batch_size = batch_size
        super().__init__(items)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        parts = {name: value[key] for name, value in self.items()}
        return Batched(parts, next(iter(parts.values())).shape[:1])

    def __setitem__(self, key: str, value: Tensor) -> None:
        if value.shape[:1] != self.batch_size:
            raise RuntimeError("batch dimension mismatch")
        super().__setitem__(key, value)


def test_containers_that_know_their_batch_dimension_are_sliced() -> None:
    batch = {"inner": Batched({"x": rows(5, 2), "y": rows(5)}, torch.Size([5]))}
    parts = [part["inner"] for part in BatchSplitter(expected=5).split(batch, [2, 3])]
    assert [part.batch_size for part in parts] == [torch.Size([2]), torch.Size([3])]
    assert torch.equal(torch.cat([part["x"] for part in parts]), rows(5, 2))
    assert with_own_tensors(batch)["inner"].batch_size == torch.Size([5])


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


# --- the batch dimension is known -------------------------------------------------------------------------------------


def test_time_major_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"first dimension: x \(5, 4, 2\), y \(5, 4\).*split_batch"):
        BatchSplitter(expected=4, remainder=3).count({"x": torch.ones(5, 4, 2), "y": torch.ones(5, 4)})


def test_constants_as_large_as_the_last_batch_stay_whole() -> None:
    splitter = BatchSplitter(expected=4, remainder=3)
    constant = torch.ones(3, 3)
    assert splitter.count({"x": rows(4, 2), "constant": constant}) == 4
    last = {"x": rows(3, 2), "constant": constant}
    assert splitter.count(last) == 3
    assert [part["constant"] is constant for part in splitter.split(last, [2, 1])] == [True, True]
    assert [len(part["x"]) for part in splitter.split(last, [2, 1])] == [2, 1]


def test_constants_as_large_as_a_full_batch_are_found_out_in_the_last() -> None:
    splitter = BatchSplitter(expected=4, remainder=3)
    constant = torch.ones(4)
    assert splitter.count((rows(4, 2), constant)) == 4
    assert splitter.count((rows(3, 2), constant)) == 3
    parts = splitter.split((rows(3, 2), constant), [1, 2])
    assert [part[1] is constant for part in parts] == [True, True]
    assert splitter.count((rows(4, 2), constant)) == 4


def test_lists_of_samples_whose_length_happens_to_be_that_of_the_batch() -> None:
    """One of four sequences is four long: the list is cut, and not the sequence."""
    splitter = BatchSplitter(expected=4)
    sequences = [torch.ones(2), torch.ones(4), torch.ones(7), torch.ones(3)]
    batch = {"sequences": sequences, "labels": torch.arange(4)}
    assert splitter.count(batch) == 4
    first, second = splitter.split(batch, [1, 3])
    assert first["sequences"] == sequences[:1]
    assert all(one is other for one, other in zip(second["sequences"], sequences[1:], strict=True))
    assert second["labels"].tolist() == [1, 2, 3]
    again = {"sequences": [torch.ones(4)] * 4, "labels": torch.arange(4)}
    assert splitter.count(again) == 4
    assert [len(part["sequences"]) for part in splitter.split(again, [1, 3])] == [1, 3]


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "other", [Path("a/b"), datetime(2026, 1, 1), Colour.RED, object(), print, {1, 2}, b"bytes", range(4), slice(2)]
)
def test_what_is_no_batch_of_anything_is_passed_whole(other: Any) -> None:
    splitter = BatchSplitter(expected=4)
    batch = {"x": rows(4, 2), "other": other, "deep": [{"other": (other,)}]}
    assert splitter.count(batch) == 4
    for part in splitter.split(batch, [1, 3]):
        assert part["other"] is other
        assert part["deep"][0]["other"][0] is other


def test_contradictions_are_refused_with_the_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"batch size is 4, but nothing.*this size.*: x \(6, 2\), y \(6,\).*split_batch"
    ):
        BatchSplitter(expected=4).count({"x": rows(6, 2), "y": rows(6)})
    splitter = BatchSplitter(expected=4, remainder=3)
    assert splitter.count({"x": rows(4, 2), "y": rows(4)}) == 4
    with pytest.raises(ValueError, match=r"equal numbers.*now have \[2, 4\]: x \(4, 2\), y \(2,\)"):
        splitter.count({"x": rows(4, 2), "y": rows(2)})


# --- copies -----------------------------------------------------------------------------------------------------------


def nested() -> dict[str, Any]:
    return {
        "x": rows(4, 2).double().requires_grad_(),
        "pair": Pair(rows(4), [rows(4), {"deep": numpy.arange(4)}]),
        "record": Record(rows(4), "train"),
        "names": ["a", "b"],
        "other": SimpleNamespace(values=[1]),
    }


def test_own_tensors_share_no_storage() -> None:
    batch = nested()
    before = versions(batch)
    own = with_own_tensors(batch)
    assert own["x"].requires_grad
    assert own["x"].is_leaf
    for tensor in tensors_of(own):
        tensor.data.add_(1)
    own["pair"].y[1]["deep"] += 1
    own["other"].values.append(2)
    assert torch.equal(batch["x"], rows(4, 2).double())
    assert batch["pair"].y[1]["deep"].tolist() == [0, 1, 2, 3]
    assert batch["record"].x.tolist() == [0, 1, 2, 3]
    assert batch["other"].values == [1]
    assert versions(batch) == before


def test_versions_tell_of_changes_in_place() -> None:
    batch = nested()
    before = versions(batch)
    batch["pair"].y[0].mul_(2)
    assert versions(batch) != before
    assert versions(rows(2)) == [0]


# --- weights ----------------------------------------------------------------------------------------------------------


LABELS = torch.tensor([[1, 2, -100], [-100, -100, -100], [4, 5, 6], [7, -100, -100]])


class Shifting(nn.Module):
    """Looks like a causal language model of Hugging Face."""

    loss_function = None


Shifting.__name__ = "ToyForCausalLM"


def shifting() -> nn.Module:
    module = Shifting()
    module.config = SimpleNamespace(is_encoder_decoder=False)
    return module


def weights_of(batch: dict[str, torch.Tensor], sizes: list[int], module: nn.Module | None = None) -> list[float]:
    parts = BatchSplitter().split(batch, sizes)
    return LossWeights(module=module).read(batch, sum(sizes)).weights_of(parts, sizes)


def test_unmasked_tokens_count() -> None:
    assert weights_of({"labels": LABELS}, [1, 1, 2]) == [2, 0, 4]
    assert LossWeights().read({"labels": LABELS}, 4).weight == 6


def test_the_first_label_does_not_count_for_the_next_token() -> None:
    assert weights_of({"labels": LABELS}, [1, 1, 1, 1], shifting()) == [1, 0, 2, 0]


def test_samples_count_without_integer_labels() -> None:
    assert weights_of({"x": LABELS}, [3, 1]) == [3, 1]
    assert weights_of({"labels": LABELS.float()}, [3, 1]) == [3, 1]
    assert weights_of({"labels": torch.tensor([1, 2, -100, 3])}, [3, 1]) == [2, 1]


def test_the_users_weight_decides_and_must_add_up() -> None:
    batch = {"labels": LABELS}
    found = LossWeights(lambda part: part["labels"].gt(4).sum()).read(batch, 4)
    assert found.weight == 3
    assert found.weights_of(BatchSplitter().split(batch, [2, 2]), [2, 2]) == [0, 3]
    with pytest.raises(ValueError, match=r"adds up to 2\.0.*to 1\.0"):
        LossWeights(lambda part: 1.0).read(batch, 4).weights_of([None, None], [2, 2])


# --- batches without version counters --------------------------------------------------------------------------------


def test_nested_tensors_in_inference_mode_end_no_step() -> None:
    with torch.inference_mode():
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
        kept = BatchGuard().keep({"x": nested, "y": torch.ones(2)})
        assert not kept.has_changed
        kept.batch["y"].zero_()
        assert kept.has_changed


def test_what_finds_no_memory_to_be_compared_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(HostCopy, "is_in", fail)
    with torch.inference_mode():
        guard, batch = BatchGuard(), {"y": torch.ones(2)}
        kept = guard.keep(batch)
        batch["y"].zero_()
        assert kept.has_changed
        assert guard.restored(kept)["y"].tolist() == [1, 1]


class Graphs:
    """A batch of graphs as PyTorch Geometric's: the nodes of all in one tensor, and the graph of each node."""

    def __init__(self, graphs: list[Tensor]) -> None:
        self.graphs = graphs
        self.x = torch.cat(graphs)
        self.batch = torch.repeat_interleave(torch.tensor([len(graph) for graph in graphs]))
        self.num_graphs = len(graphs)

    @classmethod
    def from_data_list(cls, graphs: list[Tensor]) -> "Graphs":
        return cls(graphs)

    def index_select(self, index: list[int]) -> list[Tensor]:
        return [self.graphs[one] for one in index]


def test_graphs_are_counted_and_cut_as_their_batch_says() -> None:
    batch = Graphs([torch.full((3 + number % 3, 4), number) for number in range(16)])
    splitter = BatchSplitter(expected=16)
    assert splitter.count(batch) == 16
    parts = splitter.split(batch, [7, 9])
    assert [part.num_graphs for part in parts] == [7, 9]
    assert torch.equal(torch.cat([part.x for part in parts]), batch.x)
    with pytest.raises(ValueError, match=r"of 2 graphs can't be split.*split_batch"):
        splitter.split(SimpleNamespace(num_graphs=2), [1, 1])
