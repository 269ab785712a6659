"""Random numbers go on after a checkpoint, on every rank with its own."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_memfit import WholeSteps
from lightning_memfit.models import CausalLM
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 32}


class Drawn(pl.Callback):
    """Seeds each rank differently, and notes a number that each draws in every step, and the loss."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.noted: list[tuple[float, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(self.seed + trainer.global_rank)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.noted.append((outputs["loss"].item(), torch.rand(1).item()))


class SaveAtTwo(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def train(folder: Path, seed: int, *callbacks: pl.Callback, checkpoint: Path | None = None) -> list[Any]:
    torch.manual_seed(0)
    row = torch.randint(32, (8,), generator=torch.Generator().manual_seed(0))
    loader = DataLoader([{"input_ids": row, "labels": row}] * 32, batch_size=2)  # Lightning begins its loader anew
    drawn = Drawn(seed)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    options = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}
    trainer = quiet_trainer(drawn, *callbacks, default_root_dir=folder, max_steps=4, **options)
    trainer.fit(CausalLM(config=TINY, warmup_steps=0), loader, ckpt_path=checkpoint)
    return drawn.noted


def stop_and_go_on(folder: Path, path: Path, *callbacks: type[pl.Callback]) -> tuple[list[Any], list[Any]]:
    made = [callback() for callback in callbacks]
    whole = train(folder, 0, *made, SaveAtTwo(path))
    return whole[2:], train(folder, 100, *[callback() for callback in callbacks], checkpoint=path)


def on_a_rank(folder: Path, *callbacks: type[pl.Callback]) -> tuple[list[Any], list[Any]]:
    torch.distributed.init_process_group("gloo")
    return stop_and_go_on(folder, folder / "two.ckpt", *callbacks)


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    ended = run_ranks(on_a_rank, 2, tmp_path, tmp_path, WholeSteps)
    assert [one.error for one in ended] == ["", ""]
    for one in ended:
        whole, resumed = one.result
        assert len(resumed) == 2
        assert resumed == whole
    assert ended[0].result[0] != ended[1].result[0], "ranks draw other numbers"


class FailsAlone(pl.Callback):
    """The first rank fails and saves; the other one fails once there is a file, or when it has waited long enough."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        begin = time.monotonic()
        while trainer.global_rank and not self.path.exists() and time.monotonic() - begin < 15:
            time.sleep(0.05)
        raise ArithmeticError(f"saved: {self.path.exists()}")

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.path)


def fail_on_a_rank(folder: Path, *callbacks: type[pl.Callback]) -> None:
    torch.distributed.init_process_group("gloo")
    train(folder, 0, *[callback() for callback in callbacks], FailsAlone(folder / "failed.ckpt"))


def test_a_rank_that_fails_alone_saves(tmp_path: Path) -> None:
    _, second = run_ranks(fail_on_a_rank, 2, tmp_path, tmp_path, WholeSteps)  # the first one waits in a barrier
    assert "ArithmeticError: saved: True" in second.error
    saved = torch.load(tmp_path / "failed.ckpt", weights_only=False)
    assert saved["global_step"] == 1
    assert len(saved["memfit_random"]) == 1
