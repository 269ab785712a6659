"""Under FSDP2, an error on one rank ends all of them soon, with the message there and the rank's number elsewhere."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_memfit import WholeSteps
from lightning_memfit.fitting import MicroBatching
from tests.helpers import ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import (
    Tagger,
    be_killed,
    break_down,
    fail,
    run_out_of_memory,
    train,
)
from tests.helpers.trainers import quiet_trainer

EARLY, LATE = 2, 20
VALIDATED = {"limit_val_batches": 2, "val_check_interval": 2}


class EndsInTheThirdStep(BoringModel):
    """Ends the second rank in its third step."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.action = action

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            self.action()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.nightly_cases("backward-10", "forward-20", "validation-4", "training step-1")
@pytest.mark.parametrize(
    ("where", "number", "options"),
    [
        ("training step", 1, {}),
        ("forward", LATE, {}),
        ("backward", EARLY, {}),
        ("backward", 10, {}),
        ("step", 2, {}),
        ("validation", 4, VALIDATED),
    ],
)
def test_an_error_on_one_rank_ends_all(where: str, number: int, options: dict, tmp_path: Path) -> None:
    first, second = run_ranks(lambda: fail(where, number, break_down, **options), 2, tmp_path, seconds=60)
    assert second.error == "ValueError: no such column"
    assert "Rank 1 failed" in first.error
    assert "no such column" in first.error
    assert max(first.seconds, second.seconds) < 30


@pytest.mark.parametrize(("where", "number"), [("backward", 16), ("validation", 10)])
def test_a_shortage_in_what_had_fitted_ends_all(where: str, number: int, tmp_path: Path) -> None:
    options = VALIDATED if where == "validation" else {}
    ended = run_ranks(lambda: fail(where, number, run_out_of_memory, **options), 2, tmp_path, seconds=60)
    step = "validation_step" if where == "validation" else "training_step"
    for rank, process in enumerate(ended):
        assert ("Rank 1 failed" in process.error) == (rank == 0)
        assert f"Memory ran out on rank 1 in `{step}`" in process.error
        assert "micro_batch_size=..." in process.error
        assert process.seconds < 30


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(rank: int, tmp_path: Path) -> None:
    ended = run_ranks(lambda: fail("forward", LATE, be_killed, rank=rank), 2, tmp_path, seconds=60)
    assert ended[rank].code == -9
    assert f"Rank {rank} failed" in ended[1 - rank].error
    assert ended[1 - rank].seconds < 30


@pytest.mark.parametrize("action", [break_down, be_killed])
@pytest.mark.parametrize("name", ["memfit_ddp", "memfit_fsdp2", "memfit_zero_2", "ddp"])
def test_a_rank_that_ends_is_named_without_micro_batches(name: str, action: Any, tmp_path: Path) -> None:
    """By our strategies alone; under Lightning's own it takes a callback such as `WholeSteps`."""

    def run() -> None:
        trainer = quiet_trainer(*[WholeSteps()] * (name == "ddp"), strategy=name, devices=2, max_steps=8)
        trainer.fit(EndsInTheThirdStep(action), DataLoader(torch.randn(32, 32), batch_size=2))

    ended = run_ranks(run, 2, tmp_path, seconds=60)
    assert "Rank 1 failed" in ended[0].error
    assert ("no such column" if action is break_down else "killed?") in ended[0].error
    assert ended[0].error.count("Rank 1 failed") == 1
    assert ended[0].seconds < 30


@pytest.mark.nightly_cases("break_down")
@pytest.mark.parametrize("action", [break_down, be_killed])
def test_three_ranks_end_when_one_does(action: Any, tmp_path: Path) -> None:
    ended = run_ranks(lambda: fail("backward", 10, action, rank=2), 3, tmp_path, seconds=60)
    for one in ended[:2]:
        assert "Rank 2 failed" in one.error
        assert one.seconds < 40


NO_UNITS = {"lightning_memfit.fitting.recovery.lockstep.FORGETS_PASSES": False}
"""As with torch 2.11, which can't forget a pass that was broken off."""


@pytest.mark.parametrize(
    ("action", "message"), [(break_down, "no such column"), (run_out_of_memory, "Memory ran out on this rank")]
)
def test_where_ranks_can_not_stop_together_all_end(action: Any, message: str, tmp_path: Path) -> None:
    first, second = run_ranks(lambda: fail("forward", LATE, action), 2, tmp_path, seconds=60, patches=NO_UNITS)
    assert message in second.error
    assert "Rank 1 failed" in first.error
    assert message in first.error
    assert max(first.seconds, second.seconds) < 30


# --- loaders that deliver different numbers of batches --------------------------------------------------------------


class Stream(IterableDataset):
    """The first rows of a data set."""

    def __init__(self, rows: Any, count: int) -> None:
        self.rows, self.count = rows, count

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(self.count))


class Promised(Stream):
    """Says that it has more rows than it has."""

    def __len__(self) -> int:
        return 32


class Unevenly(Tagger):
    """Trains and validates on as many batches of four as it is told for its rank."""

    def __init__(self, kind: type[Stream], trained: tuple[int, int], validated: tuple[int, int]) -> None:
        super().__init__(batch_size=4, num_samples=16)
        self.kind, self.trained, self.validated = kind, trained, validated

    def _stream(self, kind: type[Stream], counts: tuple[int, int]) -> DataLoader:
        return DataLoader(kind(self.dataset, 4 * counts[self.global_rank]), 4)

    def train_dataloader(self) -> DataLoader:
        return self._stream(self.kind, self.trained)

    def val_dataloader(self) -> DataLoader:
        return self._stream(Stream, self.validated)


def run_unevenly(module: Unevenly, **options: Any) -> int:
    options = {"max_epochs": 1, "limit_val_batches": 1.0, **options}
    if options.pop("is_replicated", False):
        sharded = {"strategy": "ddp", "devices": ranks.num_ranks, "use_distributed_sampler": False}
        trainer = quiet_trainer(MicroBatching(), num_sanity_val_steps=0, **sharded, **options)
        trainer.fit(module)
    else:
        train(module, MicroBatching(), **options)
    return module.trainer.global_step


@pytest.mark.parametrize(
    ("kind", "trained", "validated", "is_replicated", "message"),
    [
        (Stream, (4, 2), (2, 2), False, "Rank 1 .* no more .* after batch 2, while rank 0 .*limit_train_batches=2"),
        (Stream, (4, 2), (2, 2), True, "Rank 1 .* no more .* after batch 2, while rank 0 .*limit_train_batches=2"),
        (Stream, (2, 2), (1, 3), False, "Rank 0 .* no more .* after batch 1, while rank 1 .*limit_val_batches=1"),
        (Promised, (4, 2), (2, 2), False, "rank 0 begins a training batch, rank 1 has ended its training epoch"),
        (Stream, (0, 2), (2, 2), False, "rank 0 has ended its training epoch, rank 1 begins a training batch"),
    ],
)
def test_ranks_with_unequal_numbers_of_batches_end_in_words(
    kind: type[Stream],
    trained: tuple[int, int],
    validated: tuple[int, int],
    is_replicated: bool,
    message: str,
    tmp_path: Path,
) -> None:
    module = Unevenly(kind, trained, validated)
    for process in run_ranks(lambda: run_unevenly(module, is_replicated=is_replicated), 2, tmp_path, seconds=60):
        assert process.code == 1
        assert re.search(message, process.error), process.error
        assert process.seconds < 30


class OneSampleMore(Tagger):
    def train_dataloader(self) -> DataLoader:
        size = 4 + self.global_rank
        return DataLoader(Subset(self.dataset, range(4 * size)), size)


def test_ranks_that_cut_batches_into_unequal_numbers_end_in_words(tmp_path: Path) -> None:
    for process in run_ranks(
        lambda: train(OneSampleMore(), MicroBatching(micro_batch_size=2)), 2, tmp_path, seconds=60
    ):
        assert "equally many samples" in process.error
        assert process.seconds < 30


class Counted(BoringModel):
    """Has as many batches on each rank as that rank's number leaves of five."""

    def _loader(self) -> DataLoader:
        return DataLoader(torch.ones(5 - self.global_rank, 32))

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    def on_validation_epoch_end(self) -> None:
        pass


def told(strategy: str) -> list[str]:
    """What became of each stage."""
    found = []
    for stage, limits in (("fit", {}), ("validate", {}), ("test", {}), ("predict", {}), ("fit", {"max_steps": 4})):
        limits = {"limit_val_batches": 0, **limits} if stage == "fit" else limits
        shared = {"strategy": strategy, "devices": ranks.num_ranks, "use_distributed_sampler": False}
        try:
            getattr(quiet_trainer(**shared, **({"max_epochs": 1} | limits)), stage)(Counted())
            found.append("")
        except MisconfigurationException as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        ("memfit_ddp", ["training"]),
        ("memfit_fsdp2", ["training", "validation", "the test", "prediction"]),
        ("memfit_zero_3", ["training", "validation", "the test", "prediction"]),
    ],
)
def test_unequal_loaders_are_refused_where_ranks_would_wait(strategy: str, refused: list[str], tmp_path: Path) -> None:
    """Lightning repeats no sample that is predicted: a rank without one ended, and left the others in a collective."""
    if "zero" in strategy:
        pytest.importorskip("deepspeed")
    for process in run_ranks(told, 2, tmp_path, strategy, seconds=60):
        assert not process.error, process.output[-3000:]
        words = [f"Rank 1 has 4 batches for {stage}, rank 0 has 5: under `strategy=memfit_" for stage in refused]
        expected = [*words, *[""] * (4 - len(words)), ""]
        assert [message[: len(start)] for message, start in zip(process.result, expected, strict=True)] == expected
        assert process.result[-1] == ""
        assert bool(process.result[1]) == ("validation" in refused)
