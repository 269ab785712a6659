"""A step traced as one rank of many."""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_memfit.memory import Category
from lightning_memfit.models import CausalLM
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.events import canonical
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, Trace, TraceError
from lightning_memfit.strategies import DataParallelStrategy, FullyShardedStrategy
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.truth.profile.modules import trace_step

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(pl.LightningModule):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.start = nn.Linear(16, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.end = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.end(self.blocks(self.start(batch[0]))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batch(size: int = 8) -> Any:
    return torch.rand(size, 16), torch.zeros(size, dtype=torch.long)


def hybrid() -> FullyShardedStrategy:
    return FullyShardedStrategy(sharding_size=2)


def gathered() -> FullyShardedStrategy:
    return FullyShardedStrategy(reshard_after_forward=False)


def in_small_buckets() -> DataParallelStrategy:
    return DataParallelStrategy(bucket_cap_mb=0.1)


def copying() -> DataParallelStrategy:
    return DataParallelStrategy(gradient_as_bucket_view=False, bucket_cap_mb=1)


def trace(depth: int, ranks: Ranks | None, device: Any = "cpu", callbacks: Any = (), shorten: bool = True) -> Trace:
    settings = (StepOptions(), Emulation(device), callbacks)
    return trace_step(Stack(depth), batch(), *settings, shorten=shorten, check_assumptions=False, ranks=ranks)


def largest(found: Trace, category: Category) -> int:
    live = found.events.live_bytes()
    return found.events.breakdown_at(int(live.argmax())).get(category)


@pytest.mark.nightly_cases("8-Fully")
@pytest.mark.nightly_cases("8-hybrid", "11-", "8-gathered", "9-")
@pytest.mark.parametrize(
    ("depth", "make", "size", "rank", "device", "callbacks"),
    [
        (8, FullyShardedStrategy, 2, 0, "cpu", ()),
        (11, FullyShardedStrategy, 5, 4, "cpu", (ActivationCheckpointing(),)),
        (9, FullyShardedStrategy, 64, 7, "cuda", ()),
        (8, gathered, 2, 1, "cpu", ()),
        (8, hybrid, 4, 3, "cpu", (ActivationCheckpointing(),)),
        (8, in_small_buckets, 3, 1, "cuda", ()),
    ],
)
def test_unrolled_equals_whole(depth: int, make: Any, size: int, rank: int, device: Any, callbacks: Any) -> None:
    ranks = Ranks(make, size, rank)
    short, whole = (trace(depth, ranks, device, callbacks, shorten) for shorten in (True, False))
    assert (short.traced_blocks, whole.traced_blocks) == (5, depth)
    first, second = canonical(short.events), canonical(whole.events)
    assert np.array_equal(first.events, second.events)
    assert np.array_equal(first.sizes, second.sizes)
    assert np.array_equal(first.categories, second.categories)


def test_weights_and_states_are_divided_and_blocks_gathered() -> None:
    alone, shared = trace(6, None), trace(6, Ranks(FullyShardedStrategy, 4))
    bias = 4 * (6 * (WIDTH * 5) + WIDTH + 4)
    for category, times in ((Category.PARAMETER, 1), (Category.OPTIMIZER_STATE, 2)):
        assert largest(shared, category) == pytest.approx(largest(alone, category) / 4, abs=times * bias)
    assert largest(alone, Category.COMMUNICATION) == 0
    assert largest(shared, Category.COMMUNICATION) >= 4 * 8 * WIDTH * WIDTH


class ReplacesTheEnd(pl.Callback):
    """Puts a layer without a bias in the place of the last one, which it has read."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        end = nn.Linear(WIDTH, 4, bias=False)
        end.weight.data.copy_(pl_module.end.weight.detach())
        pl_module.end = end


@pytest.mark.parametrize("callbacks", [(), (ReplacesTheEnd(),)], ids=["divided", "replaced"])
def test_the_last_weight_is_not_kept_whole(callbacks: Any) -> None:
    module = Stack(2)
    module.end = nn.Linear(WIDTH, 4, bias=False)
    ranks = Ranks(FullyShardedStrategy, 2)
    found = trace_step(
        module, batch(), StepOptions(), Emulation("cpu"), callbacks, check_assumptions=False, ranks=ranks
    )
    assert largest(found, Category.BUFFER) < module.end.weight.nbytes


def test_no_value_is_assumed_to_judge_the_optimizer_by() -> None:
    assert trace(5, Ranks(FullyShardedStrategy, 2)).assumptions == ()


def test_gradients_of_ddp_stay_in_its_buckets() -> None:
    alone, views, copies = (trace(5, ranks) for ranks in (None, Ranks(DataParallelStrategy, 2), Ranks(copying, 2)))
    weights = largest(alone, Category.PARAMETER)
    in_flight = 4 * 4 * WIDTH * WIDTH
    assert weights <= largest(views, Category.GRADIENT) <= weights + in_flight
    assert largest(copies, Category.COMMUNICATION) == weights
    assert largest(copies, Category.GRADIENT) >= largest(alone, Category.GRADIENT)


def small_language_model(is_fused: bool = False) -> Any:
    if is_fused:
        config = {"model_type": "gpt2", "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    else:
        widths = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = {"model_type": "llama", "max_position_embeddings": 16, **widths}
    return CausalLM(pretrained=None, config={**config, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0})


class BuiltOnTheDevice(pl.LightningModule):
    def configure_model(self) -> None:
        self.blocks = nn.Sequential(*[Block() for _ in range(8)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.blocks(torch.rand(1, WIDTH)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.nightly
def test_it_is_said_if_most_is_needed_before_the_division() -> None:
    few, many = (
        trace_step(
            BuiltOnTheDevice(), batch(), StepOptions(), Emulation("cpu"), ranks=Ranks(FullyShardedStrategy, size)
        )
        for size in (2, 64)
    )
    assert not few.remarks
    assert "every rank builds the whole module" in many.remarks[0]


@pytest.mark.nightly
def test_traces_of_one_process_do_not_share_groups() -> None:
    ids = torch.randint(3, 32, (2, 16), generator=torch.Generator().manual_seed(0))

    def peak(**sizes: int) -> int:
        ranks = Ranks(lambda: FullyShardedStrategy(**sizes), 4)
        given = {"input_ids": ids, "labels": ids}
        options = {"check_assumptions": False, "ranks": ranks}
        found = trace_step(small_language_model(is_fused=True), given, StepOptions(), Emulation("cpu"), **options)
        return int(found.events.live_bytes().max())

    first = peak(tensor_parallel_size=2)
    assert peak(tensor_parallel_size=2, sharding_size=2) > 0  # other groups, a mesh of the same shape
    assert peak(tensor_parallel_size=2) == first


def test_fused_projections_are_divided_or_refused() -> None:
    """torch 2.11 has the placement, and can't divide by it."""
    ranks = Ranks(lambda: FullyShardedStrategy(tensor_parallel_size=2), 2)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    given = {"input_ids": ids, "labels": ids}
    divides = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    with nullcontext() if divides else pytest.raises(TraceError, match="can't divide fused projections .* torch 2.13"):
        trace_step(
            small_language_model(is_fused=True),
            given,
            StepOptions(),
            Emulation("cpu"),
            check_assumptions=False,
            ranks=ranks,
        )


@pytest.mark.nightly
def test_other_sizes_follow_from_two_traces() -> None:
    ranks = Ranks(FullyShardedStrategy, 2)
    profile = profile_module(Stack(8), batch(4), StepOptions(), Emulation("cpu"), ranks=ranks)
    direct = trace_step(Stack(8), batch(9), StepOptions(), Emulation("cpu"), ranks=ranks)
    assert profile.knows_every_size
    assert int(profile.events_at(9).live_bytes().max()) == int(direct.events.live_bytes().max())


def test_a_process_of_a_group_can_trace_another() -> None:
    alone = trace(5, Ranks(FullyShardedStrategy, 2))
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert trace(5, Ranks(FullyShardedStrategy, 2)).events.live_bytes().max() == alone.events.live_bytes().max()
        assert torch.distributed.get_world_size() == 2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0,), "world_size=0"),
        ((2, 2), "rank=2"),
        ((4, 0, 3), "ranks_per_machine=3"),
    ],
)
def test_ranks_that_cannot_be_are_refused(numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranks(FullyShardedStrategy, *numbers)


class Resizing(Stack):
    """Frees and makes a tensor's memory past the dispatcher."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        held = torch.ones(1 << 20)
        held.untyped_storage().resize_(0)
        loss = super().training_step(batch, batch_idx)
        held.untyped_storage().resize_(4 << 20)
        return loss


def test_storages_that_are_resized_past_the_dispatcher_are_followed() -> None:
    found = trace_step(Resizing(2), batch(), StepOptions(), Emulation("cpu")).events
    held = found.sizes[[at for at, site in enumerate(found.sites) if "ones" in found.site_names[site]]]
    assert 0 in held.tolist()
    assert held.tolist().count(4 << 20) >= 2
