"""A rank that can't write its part of a checkpoint ends the others, which say which one it was."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers.ranks import run_ranks


class Saves(pl.Callback):
    """Saves after the first step, in which one rank can't write."""

    def __init__(self, path: Path, error: BaseException | None) -> None:
        self.path, self.error = path, error

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        if self.error is not None:
            torch.save = partial(refuses, self.error)
        trainer.save_checkpoint(self.path)


def fails_on_one(strategy: str, folder: Path, failing: int, error: BaseException) -> tuple[str, float]:
    """Save under a strategy where a rank can't write, as its part of a folder is a file already or may not be made."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_memfit import strategies
    from tests.helpers.trainers import quiet_trainer

    os.environ["DS_ACCELERATOR"] = "cpu"
    kind, options = STRATEGIES[strategy]
    saves = Saves(folder / "last.ckpt", error if int(os.environ["RANK"]) == failing else None)
    made = getattr(strategies, kind)(**options)
    begin = time.monotonic()
    try:
        quiet_trainer(saves, strategy=made, devices=2, max_steps=1, limit_val_batches=0).fit(BoringModel())
    except BaseException as caught:
        return f"{type(caught).__name__}: {caught}", time.monotonic() - begin
    return "saved", 0.0


def refuses(error, *args, **kwargs):
    """In place of torch's, as root may write anywhere."""
    raise error


STRATEGIES = {
    "zero_2": ("ZeroStrategy", {"stage": 2}),
    "zero_3": ("ZeroStrategy", {"stage": 3}),
    "fsdp2": ("FullyShardedStrategy", {"process_group_backend": "gloo"}),
}


@pytest.mark.nightly_cases("zero_2-")
@pytest.mark.parametrize(("strategy", "failing"), [("zero_2", 1), ("zero_3", 0), ("fsdp2", 0)])
def test_a_rank_that_fails_inside_a_save_ends_the_others(strategy: str, failing: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    error = PermissionError(13, "Permission denied", "shard")
    ended = run_ranks(fails_on_one, 2, tmp_path / "run", strategy, tmp_path, failing, error, seconds=90)
    assert ended[failing].result, ended[failing].output[-3000:]
    assert str(error) in ended[failing].result[0]
    assert f"rank {failing}" in f"{ended[1 - failing].output}{ended[1 - failing].result}".lower()
    assert all(one.seconds < 60 for one in ended)
    from lightning_memfit.strategies.integrity import verify

    verify(tmp_path / "last.ckpt")  # the one before
