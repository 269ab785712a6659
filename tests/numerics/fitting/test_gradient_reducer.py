"""`GradientReducer`: ranks sum alike, whichever weights each of them has trained."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memfit.fitting.step import gradient_reducer
from lightning_memfit.fitting.step.gradient_reducer import GradientReducer
from tests.helpers.ranks import run_ranks

TRAINED = {"one less": ([0, 1, 2], [1]), "none on one": ([0, 1], []), "others": ([0], [1, 2])}
"""By case: numbers of the weights that each rank trains."""


def on_a_rank() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    found = {}
    for bytes_at_once in (25 << 20, 1200):
        gradient_reducer._BUFFER_BYTES = bytes_at_once
        for name, trained in TRAINED.items():
            module = nn.ParameterList(nn.Parameter(torch.zeros(length)) for length in (100, 200, 50))
            for number, weight in enumerate(module):
                weight.requires_grad_(number in trained[rank])
            reducer = GradientReducer(module)
            reducer.prepare(is_first=True)
            for number in trained[rank]:
                module[number].grad = torch.full_like(module[number], 1.0 + rank + 10 * number)
            reducer.add_up([any(number in one for one in trained) for number in range(len(module))])
            sums = [None if weight.grad is None else sorted(set(weight.grad.tolist())) for weight in module]
            found[f"{name}, {bytes_at_once}"] = sums
    return found


def test_ranks_may_train_different_weights(tmp_path: Path) -> None:
    ended = run_ranks(on_a_rank, 2, tmp_path, seconds=30)
    assert [one.error for one in ended] == ["", ""]
    for name, sums in ended[0].result.items():
        first, second = TRAINED[name.partition(", ")[0]]
        for number, found in enumerate(sums):
            expected = (number in first) * (1.0 + 10 * number) + (number in second) * (2.0 + 10 * number)
            assert found == ([expected] if expected else None), name
        assert ended[1].result[name] == sums


def test_a_gradient_counts_if_its_weight_was_trained_in_any_batch_of_the_window() -> None:
    module = nn.Linear(2, 2)
    reducer = GradientReducer(module)
    module.weight.grad = torch.ones(2, 2)
    reducer.prepare(is_first=True)
    module.weight.requires_grad_(False)
    reducer.prepare(is_first=False)
    assert reducer.present() == [True, False]
    reducer.prepare(is_first=True)
    assert reducer.present() == [False, False], "of an earlier window"
