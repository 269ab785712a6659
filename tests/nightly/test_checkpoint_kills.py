"""Runs that are killed at any moment while they write `last.ckpt` anew go on from it, with nothing mixed.

Every weight equals the number of steps so far, so that shards of two checkpoints would show.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.strategies.checkpoint_io import use_atomic_checkpoints
from tests.helpers import ranks
from tests.helpers.aio import AIO_REASON, aio_is_compiled
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

KILLS = int(os.environ.get("MEMFIT_KILLS", "0"))
"""Of each strategy. `MEMFIT_KILLS=20` takes some four minutes; by default five of them get one each."""

WIDTH, BLOCKS = 256, 4
WIDE = 768  # a rank's share has to be larger than 1 MiB to be put on disk
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "one device": ("auto", {}),
    "ddp": ("DataParallelStrategy", {"process_group_backend": "gloo"}),
    "fsdp2": ("FullyShardedStrategy", {"process_group_backend": "gloo"}),
    "zero_2": ("ZeroStrategy", {"stage": 2}),
    "zero_3": ("ZeroStrategy", {"stage": 3}),
    "zero_1": ("ZeroStrategy", {"stage": 1}),
    "tensor parallel": ("FullyShardedStrategy", {"process_group_backend": "gloo", "tensor_parallel_size": 2}),
    "zero_offload": ("ZeroStrategy", {"stage": 2, "offload_optimizer": True}),
    "zero_infinity": ("ZeroInfinityStrategy", {"disk_reserve": "16MiB"}),
}
CHOSEN = list(STRATEGIES) if KILLS else ["one device", "ddp", "fsdp2", "zero_2", "zero_3"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.weight.sum()


class Counts(pl.LightningModule):
    """Adds one to every weight in every step, as far as SGD is told so by the gradient of a sum."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        data = torch.zeros(2 * ranks.num_ranks * 10_000, 1)
        if ranks.num_ranks == 1:
            return DataLoader(data, 2)  # type: ignore[arg-type]
        return DataLoader(data, 2, sampler=DistributedSampler(data))  # type: ignore[arg-type]


class Sums(Counts):
    """Blocks that tensor parallelism divides; their weights are told by sums that the checkpoint holds, too."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        pl.LightningModule.__init__(self)
        self.net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64, n_positions=8))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        ids = torch.arange(8).expand(len(batch), 8) + self.trainer.global_step % 50
        return self.net(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SavesAndChecks(pl.Callback):
    """Writes one checkpoint anew after every step, and notes the last that was complete.

    While the strategy writes, there is a marker for each rank. The process is killed some time after the first write;
    or, counted from where the second begins, after a part of the time that the first took.
    """

    def __init__(self, checkpoint: Path, is_killed: bool, seconds: float, part: float | None) -> None:
        self.checkpoint, self.is_killed, self.seconds, self.part = checkpoint, is_killed, seconds, part
        self.noted = checkpoint.parent / "complete.json"
        self.num_saved = 0
        self.sums: list[float] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sums = state_dict["sums"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wrap_method(trainer.strategy, "save_checkpoint", self.write)
        step = trainer.global_step
        complete = json.loads(self.noted.read_text()) if self.noted.exists() else 0
        assert step >= complete, f"the checkpoint of step {complete} was complete, but this is {step}"
        if isinstance(pl_module, Sums):
            assert (self.sums is None) == (step == 0)
            assert self.sums in (None, _sums(pl_module)), f"weights of step {step} are another's"
            return
        for parameter in pl_module.parameters():
            whole = _whole(parameter)
            assert whole.unique().tolist() == [float(step)], f"{whole.unique().tolist()} in the weights of step {step}"

    def write(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        marker = marker_of(self.checkpoint, int(os.environ.get("KILLED_RANK", "0")))
        marker.touch()
        begin = time.perf_counter()
        if self.num_saved == 1 and self.part is not None:
            self.kill_after(self.seconds)
        save(*args, **kwargs)
        if self.num_saved == 0 and self.part is not None:
            self.seconds = self.part * (time.perf_counter() - begin)
        marker.unlink()

    def kill_after(self, seconds: float) -> None:
        if self.is_killed:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.sums = _sums(pl_module) if isinstance(pl_module, Sums) else None
        trainer.save_checkpoint(self.checkpoint)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            beside = self.noted.with_suffix(".new")
            beside.write_text(json.dumps(trainer.global_step))
            beside.replace(self.noted)
        self.num_saved += 1
        if self.num_saved == 1 and self.part is None:
            self.kill_after(self.seconds)


def marker_of(checkpoint: Path, rank: int) -> Path:
    """The file that is there while a rank writes the checkpoint."""
    return checkpoint.with_name(f"writing-{rank}")


def _sums(module: pl.LightningModule) -> list[float]:
    return [float(_whole(parameter).double().sum()) for parameter in module.parameters()]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        found = safe_get_full_fp32_param(parameter)
        assert found is not None
        return found
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


def train(strategy: str, checkpoint: Path, killed: tuple[bool, ...], seconds: float, part: float | None) -> None:
    from lightning_memfit import strategies

    name, options = STRATEGIES[strategy]
    rank = int(os.environ["RANK"])
    os.environ["KILLED_RANK"] = str(rank)
    is_on_disk = name == "ZeroInfinityStrategy"
    if is_on_disk:
        options = options | {"nvme_path": str(checkpoint.parent)}
    saves = SavesAndChecks(checkpoint, killed[rank], seconds, part)
    trainer = quiet_trainer(
        saves,
        strategy=getattr(strategies, name)(**options) if options else name,
        devices=ranks.num_ranks,
        use_distributed_sampler=False,
        max_steps=-1,
        max_time=None if any(killed) else {"seconds": 1},
        limit_val_batches=0,
    )
    use_atomic_checkpoints(trainer.strategy)
    module = Sums() if strategy == "tensor parallel" else Counts(WIDE if is_on_disk else WIDTH)
    trainer.fit(module, ckpt_path=checkpoint if checkpoint.exists() else None)


@pytest.mark.parametrize("strategy", CHOSEN)
def test_the_last_complete_checkpoint_always_loads(
    strategy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    if strategy == "zero_infinity" and not aio_is_compiled():
        pytest.skip(AIO_REASON)
    chance = random.Random(strategy)
    checkpoint = tmp_path / "run" / "last.ckpt"
    checkpoint.parent.mkdir()
    kills, inside, world_size = max(1, KILLS), 0, 1 if strategy == "one device" else 2
    for number in range(kills + 1):
        killed = chance.choice([(True, True), (True, False), (False, True)])[-world_size:]
        killed = (killed if any(killed) else (True,)) if number < kills else (False,) * world_size
        seconds, part = chance.uniform(0, 0.15), None if number % 2 else chance.uniform(0, 0.9)
        moment = (killed, seconds, part)
        ended = run_ranks(train, world_size, tmp_path / str(number), strategy, checkpoint, *moment, seconds=60)
        markers = [marker_of(checkpoint, rank) for rank in range(world_size)]
        inside += any(kill and marker.exists() for kill, marker in zip(killed, markers, strict=True))
        for one, was_killed, marker in zip(ended, killed, markers, strict=True):
            assert "AssertionError" not in one.error, f"after {number} kills: {one.output[-3000:]}"
            assert one.code == (-signal.SIGKILL if was_killed else one.code), one.output[-3000:]
            assert one.seconds < 60
            assert any(killed) or one.code == 0, one.output[-3000:]
            marker.unlink(missing_ok=True)
    assert json.loads((checkpoint.parent / "complete.json").read_text()) > kills
    record_property("kills", kills)
    record_property("inside a write", inside)
    record_property(f"inside a write: {strategy}", inside)
    assert inside >= kills // 4
