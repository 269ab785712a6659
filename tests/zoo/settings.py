"""Cases under other settings of a run: half precisions, windows of accumulation, and strategies on two ranks.

Each trains for ten steps in micro-batches of three of the loader's eight samples, and is compared with what the
contract of `MicroBatching` promises: a plain run of one process whose batch has all samples of a step, those of its
window and of all ranks. (Plain Lightning takes the mean of batches' and ranks' means there, whatever each of them
holds.) Differences of weights are relative to how far these have moved: rounding in half precision is a few parts in a
hundred of that, a sample that counts twice one part in eight.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_memfit import DataParallelStrategy, FullyShardedStrategy, MicroBatching, ZeroStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.zoo import CASES
from tests.zoo.base import Case
from tests.zoo.compare import STEPS, is_refusal
from tests.zoo.usual_modules import whole

NAMES = (
    *("ragged_last_batch", "token_labels", "group_norm", "hf_causal_lm", "clip_norm", "two_groups_one_cycle"),
    *("label_smoothing", "log_collection", "batch_norm_1d", "barlow_twins"),
)
SIZE = 3


@dataclass(frozen=True)
class Setting:
    """How cases are trained.

    Attributes:
        options: Makes arguments of the Trainer.
        tolerance: The largest difference of a weight, relative to how far the weights of its tensor have moved.
        ranks: Processes.
        dtype: What numbers of the module and of batches are.
        batches: Of the loader in a step.
    """

    options: Callable[[], dict[str, Any]]
    tolerance: float
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    batches: int = 1


def _half() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


def _strategy(kind: type, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"strategy": kind(process_group_backend="gloo", **options)}


SETTINGS: dict[str, Setting] = {
    "bf16-mixed": Setting(lambda: {"precision": "bf16-mixed"}, 5e-2),
    "16-mixed with a scaler": Setting(lambda: {"plugins": [_half()]}, 5e-2),
    "windows of two batches": Setting(lambda: {"precision": "64-true"}, 1e-9, dtype=torch.float64, batches=2),
    "DDP": Setting(_strategy(DataParallelStrategy), 1e-4, 2),
    "FSDP2": Setting(_strategy(FullyShardedStrategy), 1e-4, 2),
    "ZeRO-2": Setting(_strategy(ZeroStrategy, stage=2), 1e-4, 2),
    "ZeRO-3": Setting(_strategy(ZeroStrategy, stage=3), 1e-4, 2),
}

Weights = dict[str, Tensor]


class _Ends(pl.Callback):
    """Keeps whole weights before the first step and after the last one."""

    def __init__(self) -> None:
        self.kept: list[Weights] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept.append(weights_of(pl_module))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept.append(weights_of(pl_module))


def weights_of(module: pl.LightningModule) -> Weights:
    """Whole weights in full precision, whatever strategy has divided them."""
    return {name: _whole(p).detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def _whole(parameter: Tensor) -> Tensor:
    if not hasattr(parameter, "_hp_mapping") and not hasattr(parameter, "ds_id"):
        return whole(parameter)
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter)


def train(case: Case, setting: Setting, *callbacks: pl.Callback) -> list[Weights]:
    """Weights before and after training, here or on this rank; without callbacks, with all samples of a step here."""
    torch.manual_seed(0)
    module, ends = _of_dtype(case.build(), setting.dtype), _Ends()
    options = {"max_steps": STEPS, "limit_val_batches": 0, **case.trainer, **setting.options()}
    if callbacks:
        options |= {"accumulate_grad_batches": setting.batches, "devices": setting.ranks}
        loader = _of_a_rank(module.train_dataloader(), setting)
    else:
        options.pop("strategy", None)
        loader = _of_whole_steps(module.train_dataloader(), setting)
    trainer = quiet_trainer(ends, *callbacks, **{"use_distributed_sampler": False} | options)
    torch.manual_seed(1)
    trainer.fit(module, loader)
    return ends.kept


def _of_a_rank(loader: Any, setting: Setting) -> DataLoader:
    """A loader of this rank's samples, in the order of the data."""
    sampler = DistributedSampler(loader.dataset, setting.ranks, int(os.environ.get("RANK", 0)), shuffle=False)
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)


def _of_whole_steps(loader: Any, setting: Setting) -> DataLoader:
    """A loader whose batches have what all ranks get for a window: they take turns, and the last ones begin anew."""
    samples = len(loader.dataset)
    order = [*range(samples), *range(-samples % setting.ranks)]
    size = loader.batch_size * setting.batches * setting.ranks
    return DataLoader(Subset(loader.dataset, order), size, collate_fn=loader.collate_fn)


def _of_dtype(module: pl.LightningModule, dtype: torch.dtype) -> pl.LightningModule:
    """The module with floating numbers of a type, and such batches; its class changes, so that copies behave alike."""
    plain: Any = type(module)

    def on_after_batch_transfer(self: Any, batch: Any, index: int) -> Any:
        moved = plain.on_after_batch_transfer(self, batch, index)
        return apply_to_collection(moved, Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one)

    module.__class__ = type(plain.__name__, (plain,), {"on_after_batch_transfer": on_after_batch_transfer})
    return module.to(dtype)


def cut(name: str, setting: str) -> list[Weights] | str:
    """Train in micro-batches on this process, or on its rank; in words how it ended if it did."""
    case = CASES[name]
    try:
        return train(case, SETTINGS[setting], MicroBatching(micro_batch_size=SIZE, **case.micro_batching))
    except Exception as error:
        return "refused" if is_refusal(error) else f"crashed: {type(error).__name__}"


def difference(expected: list[Weights], found: list[Weights]) -> float:
    """The largest difference of a tensor of weights, relative to how far it has moved, by their norms."""
    worst = 0.0
    for name, last in expected[-1].items():
        moved = float((last - expected[0][name]).double().norm())
        off = float((last - found[-1][name]).double().norm())
        worst = max(worst, off / max(moved, 1e-12))
    return worst


def under(name: str, setting: str) -> str:
    """The verdict on a case under a setting, by their names; the worst one of all ranks."""
    chosen = SETTINGS[setting]
    expected = train(CASES[name], chosen)
    if chosen.ranks == 1:
        found = [cut(name, setting)]
    else:
        ended = run_ranks(cut, chosen.ranks, Path("ranks"), name, setting)
        found = [one.result or "ended" for one in ended]
    words = [one for one in found if isinstance(one, str)]
    if words:
        return max(words, key=lambda one: one != "refused")
    off = max(difference(expected, one) for one in found if not isinstance(one, str))
    return "exact" if off <= chosen.tolerance else f"WRONG; {off:.0e} of the way"
