"""What each rung does to a module, and what it leaves alone."""

from typing import get_args

import pytest
import torch
from torch import nn

from lightning_memfit.checkpointing.apply import CheckpointedForward, apply_checkpointing
from lightning_memfit.fitting.recovery import ladder as rungs
from lightning_memfit.fitting.recovery.ladder import InputsOnHost, LastResort, Recomputation, StatesOnHost, rungs_up_to


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def forwards(module: nn.Module) -> list[object]:
    return [vars(block).get("forward") for block in module]


def stepped() -> torch.optim.Optimizer:
    linear = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("last_resort", "count"), [("none", 0), ("recompute", 1), ("offload", 3)])
def test_how_far_the_ladder_goes(last_resort: LastResort, count: int) -> None:
    assert last_resort in get_args(LastResort)
    assert len(rungs_up_to(last_resort, blocks(), stepped(), True, 1)) == count


def test_recomputation_keeps_nothing_and_gives_back_what_was_kept() -> None:
    module = blocks()
    apply_checkpointing(list(module)[:2], ["full", "keep_matmul"])
    before = forwards(module)
    rung = Recomputation(module)
    assert rung.refusal() is None
    rung.apply()
    assert rung.description.startswith("the activations of 3 more blocks")
    assert [forward.choice for forward in forwards(module)] == ["full"] * 4  # type: ignore[attr-defined]
    assert rung.refusal() == "there is no repeated block that keeps activations"
    rung.remove()
    rung.remove()
    assert forwards(module) == before
    assert [forward.choice for forward in before[:2]] == ["full", "keep_matmul"]  # type: ignore[attr-defined]


def test_compiled_and_offloaded_blocks_stay_as_they_are() -> None:
    module = blocks()
    apply_checkpointing([module[0]], ["offload"])
    for block in list(module)[1:]:
        block._compiled_call_impl = block.forward  # what `block.compile()` sets
    assert Recomputation(module).refusal() == "there is no repeated block that keeps activations"
    assert InputsOnHost(module, True).refusal() == "no block is recomputed from inputs on the device"


def test_inputs_of_blocks_that_the_user_has_recomputed_leave_too() -> None:
    module = blocks()
    assert InputsOnHost(module, True).refusal() == "no block is recomputed from inputs on the device"
    apply_checkpointing(list(module), ["full"] * 4)
    rung = InputsOnHost(module, True)
    assert rung.refusal() is None
    rung.apply()
    assert rung.description == "the inputs of 4 recomputed blocks in host memory"
    pools = {id(forward.inputs_on_host) for forward in forwards(module) if isinstance(forward, CheckpointedForward)}
    assert len(pools) == 1
    assert rung.refusal() is not None
    rung.remove()
    assert all(forward.inputs_on_host is None for forward in forwards(module))  # type: ignore[attr-defined]


def test_without_a_host_memory_of_its_own_nothing_leaves() -> None:
    module = blocks()
    apply_checkpointing(list(module), ["full"] * 4)
    for rung in (InputsOnHost(module, False), StatesOnHost(stepped(), False, 1)):
        assert rung.refusal() == "host memory is the device's own, or none that this can use"


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of 256 KiB; a tenth of what is free is left alone."""

    class Host:
        available_bytes = 3 << 18

    monkeypatch.setattr(rungs, "probe_host", Host)
    assert StatesOnHost(stepped(), True, 1).refusal() is None
    refusal = StatesOnHost(stepped(), True, 2).refusal()
    assert refusal == "they take 512.00 KiB, and 345.60 KiB of host memory are free for them"
