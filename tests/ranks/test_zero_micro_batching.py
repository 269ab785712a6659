"""`MicroBatching` under ZeRO: the whole batch's numbers, sizes found in the first steps, and ends that say what fits.

Weights are those of the fp32 master copies, whole. Stages differ from DDP in the order of additions only.
"""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader, DistributedSampler

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.memory import MIB
from tests.helpers import ranks
from tests.helpers.aio import needs_aio
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import Moments, Tagger, never, run_out_of_memory
from tests.helpers.strategy_runs import CLIP, ZERO, Tokens, build_module
from tests.helpers.trainers import quiet_trainer

pytest.importorskip("deepspeed")

STAGES = ZERO | {
    "stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}
SAMPLES = 20  # per rank: batches of 8, 8 and 4 in each epoch


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def train(
    strategy: Any, *callbacks: pl.Callback, module: Tagger | None = None, ckpt_path: Any = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Train on this process's rank for two epochs, and return whole weights."""
    from deepspeed.utils import safe_get_full_fp32_param

    from lightning_memfit.strategies import DataParallelStrategy, ZeroInfinityStrategy, ZeroStrategy

    module = module or Tagger(num_samples=SAMPLES * ranks.num_ranks)
    made = strategy
    if isinstance(strategy, dict):
        kind = ZeroInfinityStrategy if "nvme_path" in strategy else ZeroStrategy
        made = kind(**strategy) if strategy else DataParallelStrategy(process_group_backend="gloo")
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    trainer = quiet_trainer(
        *callbacks, strategy=made, devices=ranks.num_ranks, use_distributed_sampler=False, **options
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    if strategy == {}:
        return {name: p.detach().clone() for name, p in module.named_parameters()}
    return {name: safe_get_full_fp32_param(p).clone() for name, p in module.named_parameters()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def cut_by_hand() -> dict[str, float]:
    whole = train({}, MicroBatching(micro_batch_size=8))
    return {name: difference(train(stage, MicroBatching(micro_batch_size=3)), whole) for name, stage in STAGES.items()}


@pytest.mark.nightly_cases("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_cut_batch_gives_what_the_whole_gives(world_size: int, tmp_path: Path) -> None:
    for ended in run_ranks(cut_by_hand, world_size, tmp_path, seconds=240):
        assert ended.code == 0, ended.output[-5000:]
        assert max(ended.result.values()) < 2e-6, ended.result


def start_on_disk(drive: Path) -> None:
    strategy = {"nvme_path": str(drive), "disk_reserve": "16MiB", "config": {"aio": {"block_size": MIB}}}
    train(strategy, MicroBatching(micro_batch_size=3))


@needs_aio
def test_steps_on_disk_are_refused_by_name_and_leave_nothing_there(tmp_path: Path) -> None:
    (drive := tmp_path / "drive").mkdir()
    for ended in run_ranks(start_on_disk, 2, tmp_path / "ranks", drive):
        assert ended.code == 1
        assert "`MicroBatching` compares steps, which can't be taken back where DeepSpeed" in ended.output
        assert "`accumulate_grad_batches` to the number of micro-batches" in ended.output
    assert not list(drive.iterdir())


def go_on(name: str, folder: Path, moments: Moments, size: int, resumes: bool = False) -> dict[str, torch.Tensor]:
    save = ModelCheckpoint(folder, "last", every_n_epochs=1, save_on_train_epoch_end=True)
    module = Tagger(moments, num_samples=SAMPLES * ranks.num_ranks)
    path = folder / "last.ckpt" if resumes else None
    options = {"enable_checkpointing": True, "module": module, "ckpt_path": path}
    return train(STAGES[name], save, MicroBatching(micro_batch_size=size), **options)


@pytest.mark.nightly_cases("stage_2", "stage_3")
@pytest.mark.parametrize("name", ["stage_2", "stage_3"])
def test_a_shortage_ends_all_ranks_and_the_run_goes_on(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    moments = Moments(1, "forward", (50,), run_out_of_memory)
    first, second = run_ranks(lambda: go_on(name, folder, moments, 4), 2, tmp_path / "one", seconds=90)
    assert "Rank 1 failed" in first.error
    assert "which can't be repeated" in second.error
    assert max(first.seconds, second.seconds) < 60
    size = int(re.search(r"MicroBatching\(micro_batch_size=(\d+)\)", second.error).group(1))
    assert size < 4
    resumed = run_ranks(lambda: go_on(name, folder, never(), size, True), 2, tmp_path / "two", seconds=120)
    whole = run_ranks(lambda: train({}, MicroBatching(micro_batch_size=8)), 2, tmp_path / "three", seconds=120)
    for ended in resumed:
        assert ended.code == 0, ended.output[-5000:]
        assert difference(ended.result, whole[0].result) < 2e-6


def refused() -> list[str]:
    errors = []
    for strategy, micro_batching, options in (
        (STAGES["stage_2"], MicroBatching(global_batch_size=16), {"accumulate_grad_batches": 2}),
        (STAGES["stage_2"], MicroBatching(last_resort="recompute"), {}),
    ):
        with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as error:
            train(strategy, micro_batching, **options)
        errors.append(str(error.value))
    return errors


def test_what_can_not_be_is_refused_before_training(tmp_path: Path) -> None:
    (ended,) = run_ranks(refused, 1, tmp_path, seconds=60)
    assert ended.code == 0, ended.output[-3000:]
    accumulates, repeats = ended.result
    assert "`accumulate_grad_batches=2`" in accumulates
    assert "`last_resort='recompute'`" in repeats


def test_deepspeed_s_own_counting_is_refused() -> None:
    from lightning_memfit.fitting.step.callback import check_strategy

    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="`memfit_zero_1`"):
        check_strategy(DeepSpeedStrategy(), 1, MicroBatching().options)


class Rows(pl.LightningDataModule):
    """The same rows on every rank, however many a loader delivers at once."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.size = batch_size

    def train_dataloader(self) -> DataLoader:
        sampler = DistributedSampler(Tokens(32), shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return DataLoader(Tokens(32), self.size, sampler=sampler)


def compare_with_accumulation(precision: str) -> dict[str, float]:
    """Train a GPT-2 in micro-batches that are cut, and in those that the loader delivers and Lightning accumulates."""
    from deepspeed.utils import safe_get_full_fp32_param

    from lightning_memfit.strategies import ZeroStrategy

    def weights(stage: dict[str, Any], batch_size: int, *callbacks: pl.Callback, **options: Any) -> Any:
        pl.seed_everything(0, verbose=False)
        module = build_module()
        options = {"precision": precision, "gradient_clip_val": CLIP, "max_epochs": 2, **options}
        trainer = quiet_trainer(
            *callbacks, strategy=ZeroStrategy(**stage), devices=2, use_distributed_sampler=False, **options
        )
        trainer.fit(module, Rows(batch_size))
        return {name: safe_get_full_fp32_param(p).clone() for name, p in module.named_parameters()}

    return {
        name: difference(
            weights(stage, 8, MicroBatching(micro_batch_size=2)), weights(stage, 2, accumulate_grad_batches=4)
        )
        for name, stage in STAGES.items()
    }


@pytest.mark.nightly_cases("bf16-mixed", "32-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_is_what_accumulation_gives(precision: str, tmp_path: Path) -> None:
    for ended in run_ranks(compare_with_accumulation, 2, tmp_path, precision, seconds=240):
        assert ended.code == 0, ended.output[-5000:]
        assert max(ended.result.values()) == 0.0, ended.result
