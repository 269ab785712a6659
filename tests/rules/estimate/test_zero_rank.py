"""Peaks of a rank, read off a trace: weights that are gathered, and buckets that are reduced."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_memfit.estimate import deepspeed, zero_rank
from lightning_memfit.estimate.deepspeed import DeepSpeedRun
from lightning_memfit.estimate.division import Division, estimate_rank, traced_run
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation

WIDTH, HIDDEN, ROWS = 8, 32, 256
WEIGHT = WIDTH * HIDDEN
ALL = 8 * WEIGHT + 4 * (WIDTH + HIDDEN)


class Stack(pl.LightningModule):
    """Four times a wide and a narrow layer, which the training step calls one way or the other."""

    def __init__(self, calls_itself: bool = False) -> None:
        super().__init__()
        self.calls_itself = calls_itself
        layers = [torch.nn.Linear(*sizes) for _ in range(4) for sizes in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]
        self.model = torch.nn.Sequential(*layers)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(batch)
        return found

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self(batch) if self.calls_itself else self.model(batch)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def profile_of(calls_itself: bool = False, accumulate: int = 1, rows: int = ROWS) -> ModelProfile:
    options, batch = StepOptions("32-true", accumulate), torch.rand(rows, WIDTH)
    return profile_module(Stack(calls_itself), batch, options, Emulation("cpu"), any_micro_batch=False)


def divided(stage: int, ranks: int = 2, **sizes: int) -> Division:
    return Division(f"zero_{stage}", stage, ranks, ranks, deepspeed=True, sizes=sizes)


def test_a_step_that_calls_its_module_gathers_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's record of the order begins anew with each call, so that it never has a whole one."""
    for module in (deepspeed, zero_rank):  # or all weights of a small model stay gathered
        monkeypatch.setattr(module, "PERSISTENT_NUMEL", HIDDEN)
    division = divided(3, stage3_max_live_parameters=3 * WEIGHT)
    profile, other = profile_of(), profile_of(calls_itself=True)
    assert [traced_run(found, division).gathered for found in (profile, other)] == [3 * WEIGHT, WEIGHT]
    more = estimate_rank(profile, division).allocated_bytes - estimate_rank(other, division).allocated_bytes
    assert more == 4 * 2 * WEIGHT  # where backward begins


def test_all_weights_of_a_block_are_gathered_while_it_is_recomputed() -> None:
    blocks = [ParameterInfo(f"h.{block}.{piece}", 200_000, 2) for block in range(3) for piece in ("a", "b")]
    run = DeepSpeedRun((*blocks, ParameterInfo("head", 300_000, 2)), world_size=2)
    assert (run.gathered, run.gathered_in_recomputation) == (300_000, 400_000)


@pytest.mark.parametrize(("ranks", "bucket"), [(1, 2 * ALL), (2, 2 * ALL), (2, WEIGHT)])
def test_gradients_are_kept_after_the_first_bucket_that_is_reduced(ranks: int, bucket: int) -> None:
    """One bucket for all is reduced at the end, in a copy if it has parts of two ranks; then a rank's are kept."""
    found = estimate_rank(profile_of(rows=1), divided(2, ranks, reduce_bucket_size=bucket))
    stays = 4 * ALL + 12 * ALL // ranks + 4 * 2 * bucket
    gradients = found.by_phase["forward and backward"] - stays
    least = 4 * ALL if bucket > ALL else 4 * ALL // 2
    assert least <= gradients <= least + 4 * 3 * WEIGHT


def test_stage_1_keeps_whole_gradients_of_earlier_micro_batches_and_stage_2_a_ranks() -> None:
    size = {"reduce_bucket_size": WEIGHT}
    first, second = (
        [
            estimate_rank(profile_of(accumulate=accumulate), divided(stage, **size)).by_phase["forward and backward"]
            for accumulate in (1, 2)
        ]
        for stage in (1, 2)
    )
    assert first[0] == second[0]
    assert first[1] > first[0]
    assert second[1] > second[0]
