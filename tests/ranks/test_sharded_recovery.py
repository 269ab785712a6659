"""Under FSDP2, memory that runs out on one rank while a size is new changes nothing: all repeat it in smaller parts.

One set of processes trains many small runs, one after the other, each disturbed at other moments.
"""

import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.recovery.lockstep import Lockstep
from tests.helpers.fitting import VOCABULARY, is_checking
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import Moments, Tagger, close, run_out_of_memory, train

TOLERANCE = 1e-6
MOMENTS = int(os.environ.get("MEMFIT_MOMENTS", 5))
"""At how many random moments of the first two steps memory runs out; `make faults` has 20."""
VALIDATED: dict[str, Any] = {"num_sanity_val_steps": 1, "limit_val_batches": 3, "val_check_interval": 1}
DISTURBED: dict[str, tuple[str, tuple[int, ...]]] = {
    "at first": ("training step", (1,)),
    "forward": ("forward", (3,)),
    "backward": ("backward", (2,)),
    "loss": ("loss", (3,)),
    "forward, later": ("forward", (22,)),
    "backward, later": ("backward", (11,)),
    "backward of all ranks' last block": ("backward", (12,)),
    "first optimizer step": ("step", (1,)),
    "often": ("forward", (3, 31)),
}
IN_VALIDATION: dict[str, tuple[str, tuple[int, ...]]] = {
    "sanity check": ("validation step", (1,)),
    "forward of validation": ("validation", (3,)),
    "training after validation": ("forward", (22,)),
}


def disturbed(
    runs: dict[str, tuple[str, tuple[int, ...]]], rank: int, options: dict[str, Any], size: int = 4
) -> dict[str, tuple[int, float, float]]:
    """By name of the run: failures on this rank, the difference from an undisturbed run, and its seconds."""
    whole = train(Tagger(), MicroBatching(micro_batch_size=8), **options)
    found = {}
    for name, (where, numbers) in runs.items():
        moments = Moments(rank, where, numbers, run_out_of_memory)
        run = train(Tagger(moments), MicroBatching(micro_batch_size=size), **options)
        found[name] = (moments.failures, close(run, whole), run[2])
    return found


def assert_nothing_changed(runs: dict[str, tuple[str, tuple[int, ...]]], ended: list[Any], rank: int) -> None:
    outputs = "\n".join(f"exit code {process.code}: {process.output[-5000:]}" for process in ended)
    assert not any(process.code for process in ended), outputs
    for process in ended:
        for name in runs:
            _, difference, seconds = process.result[name]
            assert difference < TOLERANCE, name
            assert seconds < 60, name
    for name, (_, numbers) in runs.items():
        assert ended[rank].result[name][0] == len(numbers), name


@pytest.mark.nightly
@pytest.mark.nightly_cases("2 copies of 2 shards", "3 ranks", "accumulated", "copies", "kept gathered", "1 rank")
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"accumulate_grad_batches": 2}),
        (2, {"strategy": {"reshard_after_forward": False}}),
        (2, {"strategy": {"sharding_size": 1}}),
        pytest.param(3, {}),
        pytest.param(4, {"strategy": {"sharding_size": 2}}),
    ],
    ids=["1 rank", "2 ranks", "accumulated", "kept gathered", "copies", "3 ranks", "2 copies of 2 shards"],
)
def test_memory_that_runs_out_on_one_rank_changes_nothing(
    world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    runs = {name: run for name, run in DISTURBED.items() if not options or "later" in name or name == "backward"}
    if "accumulate_grad_batches" in options:
        runs = {name: run for name, run in runs.items() if "optimizer" not in name}
    rank = world_size - 1
    assert_nothing_changed(runs, run_ranks(lambda: disturbed(runs, rank, options), world_size, tmp_path), rank)


@pytest.mark.nightly
@pytest.mark.nightly_cases("kept gathered")
@pytest.mark.parametrize("strategy", [{}, {"reshard_after_forward": False}], ids=["2 ranks", "kept gathered"])
def test_so_it_does_in_validation(strategy: dict[str, Any], tmp_path: Path) -> None:
    options = {**VALIDATED, "strategy": strategy}
    ended = run_ranks(lambda: disturbed(IN_VALIDATION, 1, options), 2, tmp_path)
    assert_nothing_changed(IN_VALIDATION, ended, 1)


class Keeper(Tagger):
    """Has no repeated blocks, so that ranks have no need of each other in validation, and keeps what it finds there."""

    def __init__(self, moments: Moments | None = None) -> None:
        super().__init__(moments)
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))
        self.accuracy = MeanMetric()
        self.kept: list[int] = []
        self.by_name: dict[str, list[float]] = defaultdict(list)
        self.total = torch.zeros(())

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        rows = len(batch["labels"])
        loss = self._loss(batch)
        self.log("val_loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=rows)
        self.accuracy.update((self.net(batch["input_ids"]).argmax(-1) == batch["labels"]).float())
        self.log("accuracy", self.accuracy)
        self.kept.extend(batch["index"].tolist())
        self.by_name["rows"].append(rows)
        self.total += rows
        self.tell("validated")


def validate_with_failures() -> dict[str, Any]:
    """What is logged and kept in one validation, undisturbed and with a failure on its first batch."""
    found = {}
    for number in (0, 1):
        moments = Moments(1, "validated", (number,), run_out_of_memory)
        module = Keeper(moments)
        _, logged, _ = train(module, MicroBatching(micro_batch_size=8), max_epochs=1, limit_val_batches=1.0)
        found[str(number)] = logged, module.kept, sum(module.by_name["rows"]), float(module.total), moments.failures
    return found


def test_a_discarded_validation_step_leaves_no_trace_on_any_rank(tmp_path: Path) -> None:
    """Memory runs out on rank 1 when rank 0 has finished and logged the same batch."""
    for rank, process in enumerate(run_ranks(validate_with_failures, 2, tmp_path)):
        assert process.code == 0, process.output[-5000:]
        whole = process.result.pop("0")
        for found in process.result.values():
            assert found[-1] == rank
            assert found[1:-1] == whole[1:-1]
            assert found[0] == pytest.approx(whole[0], abs=TOLERANCE)


@pytest.mark.nightly_cases("2", "3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_moments(world_size: int, tmp_path: Path) -> None:
    """Any moment of the first two steps, of which there are some 48; optimizer steps are copied."""
    full = {"lightning_memfit.fitting.step.callback.find_device_memory": lambda trainer: Full()}
    moments = random.Random(world_size).sample(range(1, 45), MOMENTS)
    runs = {str(moment): ("", (moment,)) for moment in moments}
    ended = run_ranks(lambda: disturbed(runs, 1, {}), world_size, tmp_path, seconds=300, patches=full)
    late = [name for name in runs if ended[1].result and not ended[1].result[name][0]]
    assert not late  # each of them came
    assert_nothing_changed(runs, ended, 1)


class Full:
    """A device without free memory."""

    limit_bytes = live_bytes = peak_bytes = 0

    def reset_peak(self) -> None: ...


# --- agreement ------------------------------------------------------------------------------------------------------


class Longer(Tagger):
    """Its last batches are longer than all before, on one rank."""

    def train_dataloader(self) -> DataLoader:
        def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            batch = torch.utils.data.default_collate(rows)
            if self.global_rank == 1 and int(batch["index"][0]) >= 32:
                batch |= {name: torch.cat([batch[name]] * 2, dim=1) for name in ("input_ids", "labels")}
            return batch

        loader = super().train_dataloader()
        return DataLoader(self.dataset, self.batch_size, sampler=loader.sampler, collate_fn=collate)


class Agreements(pl.Callback):
    """How often ranks have agreed in each step."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._before = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.numbers.append(Lockstep.num_agreements - self._before)
        self._before = Lockstep.num_agreements


def count_agreements() -> list[int]:
    agree = Lockstep._agree

    def counted(self: Lockstep, *args: Any, **kwargs: Any) -> int:
        Lockstep.num_agreements += not is_checking()
        return agree(self, *args, **kwargs)

    Lockstep.num_agreements, Lockstep._agree = 0, counted
    counter = Agreements()
    train(Longer(num_samples=96), counter, MicroBatching(micro_batch_size=8))
    return counter.numbers


def test_ranks_agree_while_a_shape_is_new(tmp_path: Path) -> None:
    """Six batches per epoch, of which the last four are longer: two are watched at first, then the first longer one."""
    for process in run_ranks(count_agreements, 2, tmp_path):
        assert process.code == 0, process.output[-5000:]
        at_first, second, longer, *others = process.result
        assert at_first == second == longer > 0
        assert others == [0] * 9


# --- the size -------------------------------------------------------------------------------------------------------


def climb() -> tuple[int, float, str]:
    """Run out of memory with two samples, and then with one."""
    whole = train(Tagger(), MicroBatching(micro_batch_size=8))
    moments = Moments(1, "backward", (1, 2), run_out_of_memory)
    callback = MicroBatching(micro_batch_size=2, last_resort="recompute")
    run = train(Tagger(moments), callback)
    return moments.failures, close(run, whole), callback.changes[-1][2]


@pytest.mark.nightly
def test_blocks_are_recomputed_where_one_sample_does_not_fit(tmp_path: Path) -> None:
    first, second = run_ranks(climb, 2, tmp_path)
    for process in (first, second):
        assert process.code == 0, process.output[-5000:]
        assert process.result[1] < TOLERANCE
        assert "3 more blocks recomputed" in process.result[2]
    assert second.result[0] == 2
