import timeit
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memfit.fitting.size.shapes import NoPrediction, ShapeGuard, _described, shape_of


def tokens(length: int, samples: int = 16) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(samples, length, dtype=torch.long), "labels": torch.zeros(samples)}


class Model:
    """A prediction for a step whose memory is the number of tokens, with room for 1,000."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, batch: dict[str, Tensor], upper: int) -> int:
        length = batch["input_ids"].size(1)
        self.asked.append((length, upper))
        return min(upper, 1000 // length)


def test_a_longer_batch_gets_what_it_has_room_for_and_the_next_one_all() -> None:
    model = Model()
    guard = ShapeGuard(shape_of(tokens(100)), 10, model)
    assert [guard.size_for(tokens(n), 10) for n in (100, 250, 100, 60, 250, 125)] == [10, 4, 10, 10, 4, 8]
    assert model.asked == [(250, 10), (125, 10)]


def test_many_lengths_need_few_predictions() -> None:
    model = Model()
    guard = ShapeGuard(shape_of(tokens(10)), 100, model)
    for length in torch.randint(10, 500, (300,), generator=torch.Generator().manual_seed(0)).tolist():
        size = guard.size_for(tokens(length), 100)
        assert 0.7 * (1000 // length) <= size <= max(1, 1000 // length)
    assert len(model.asked) <= 40


@pytest.mark.parametrize("is_asked", [True, False])
def test_without_a_prediction_memory_is_taken_to_grow_with_the_square(is_asked: bool) -> None:
    def refuse(batch: Any, upper: int) -> int:
        raise NoPrediction("no trace")

    guard = ShapeGuard(shape_of([torch.zeros(16, 100)]), 40, refuse if is_asked else None)
    assert guard.size_for([torch.zeros(16, 200)], 40) == 10
    assert guard.size_for([torch.zeros(16, 100)], 40) == 40
    assert guard.size_for([torch.zeros(16, 2000)], 40) == 1


@dataclass
class Fields:
    x: Tensor
    name: str = "a"


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.zeros(8, n),
        lambda n: [torch.zeros(8, n), torch.zeros(8)],
        lambda n: (torch.zeros(8, n), {"y": [torch.zeros(8)], "names": ["a"] * 8}),
        lambda n: UserDict(x=torch.zeros(8, n)),
        lambda n: {"x": np.zeros((8, n)), "id": 3, "none": None},
        lambda n: Fields(torch.zeros(8, n)),
        lambda n: [torch.zeros(n) for _ in range(8)],
        lambda n: {"x": torch.nn.Parameter(torch.zeros(8, n))},
    ],
)
def test_any_batch(make: Any) -> None:
    guard = ShapeGuard(shape_of(make(10)), 8, lambda batch, upper: 2)
    assert [guard.size_for(make(n), 8) for n in (10, 5, 20, 10, 20)] == [8, 8, 2, 8, 2]


def test_a_known_shape_costs_next_to_nothing() -> None:
    guard = ShapeGuard(shape_of(tokens(100)), 10, None)
    batch = tokens(100)
    assert min(timeit.repeat(lambda: guard.size_for(batch, 10), number=2000, repeat=5)) / 2000 < 3e-6


def test_shapes_in_messages_leave_out_what_has_none() -> None:
    batch = {"ids": torch.zeros(64, 128), "names": ["a"] * 64, "epoch": 3, "images": [torch.zeros(2, 3)]}
    assert _described(shape_of(batch)) == "64 x 128, 2 x 3"
