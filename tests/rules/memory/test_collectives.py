"""`broadcast_from_first`: the first rank's values, whatever the layout of a tensor, and nothing beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from lightning_memfit.memory.collectives import broadcast_from_first
from tests.helpers.ranks import run_ranks

LAYOUTS = {
    "contiguous": lambda base: base,
    "cut": lambda base: base[:, :4],
    "every other row": lambda base: base[::2],
    "turned": lambda base: base.t(),
    "channels last": lambda base: base.view(1, 2, 4, 8).contiguous(memory_format=torch.channels_last),
    "expanded": lambda base: base[0].expand(3, 8),
    "one element": lambda base: base[3, 3],
    "one element repeated": lambda base: base[3, 3].expand(4, 5),
    "empty": lambda base: base[:0],
}


def values(rank: int) -> Tensor:
    return torch.arange(64.0).view(8, 8) + 100 * rank


def share() -> dict[str, tuple[Tensor, Tensor]]:
    distributed.init_process_group("gloo")
    bases = {name: values(distributed.get_rank()) for name in LAYOUTS}
    tensors = {name: layout(bases[name]) for name, layout in LAYOUTS.items()}
    broadcast_from_first(tensors.values())
    return {name: (tensors[name].clone(), bases[name]) for name in LAYOUTS}


def test_all_layouts_have_the_first_ranks_values(tmp_path: Path) -> None:
    first, second = run_ranks(share, 2, tmp_path)
    assert (first.error, second.error) == ("", "")
    for name, layout in LAYOUTS.items():
        wanted = layout(values(0))
        assert torch.equal(first.result[name][0], wanted), name
        assert torch.equal(second.result[name][0], wanted), name
        if name == "channels last":  # is a copy
            continue
        beside = values(1)
        places = layout(torch.arange(64).view(8, 8)).flatten()
        beside.view(-1)[places] = values(0).view(-1)[places]
        assert torch.equal(second.result[name][1], beside), f"{name}: what lies beside it"


def test_only_contiguous_tensors_are_handed_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses others; a tensor that is contiguous is sent where it lies."""
    sent: list[Tensor] = []

    def broadcast(tensor: Tensor, src: int) -> Any:
        assert tensor.is_contiguous()
        sent.append(tensor)
        tensor.add_(1)

    monkeypatch.setattr(distributed, "broadcast", broadcast)
    for name, layout in LAYOUTS.items():
        tensor = layout(values(0))
        before = tensor.clone()
        broadcast_from_first([tensor])
        assert torch.equal(tensor, before + 1), name
        if tensor.is_contiguous():
            assert sent[-1].data_ptr() == tensor.data_ptr(), name


def test_weights_that_need_gradients_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "broadcast", lambda tensor, src: tensor.zero_())
    weights = torch.nn.Parameter(torch.ones(4, 4))
    turned = torch.nn.Parameter(torch.ones(4, 6).t())
    broadcast_from_first([weights, turned], torch.device("cpu"))
    assert not weights.any()
    assert not turned.any()
