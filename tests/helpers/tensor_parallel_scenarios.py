"""What tensor parallelism must not get wrong without a word. Run by `strategy_runs`, on every rank."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import distributed

from tests.helpers.strategy_runs import BATCH, TokenData, Tokens, build_module, build_trainer
from tests.helpers.strategy_scenarios import HALF, train


def _gathered(value: Any) -> list[Any]:
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


class OwnLosses(pl.Callback):
    """The loss of every micro-batch on this rank."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


def dropout_with_other_seeds(case: dict[str, Any]) -> dict[str, Any]:
    """Ranks begin with other weights and random numbers; what they compute must be one model's losses."""
    rank = int(distributed.get_rank()) if distributed.is_initialized() else 0
    pl.seed_everything(17 + rank, verbose=False)
    losses = OwnLosses()
    build_trainer(case, losses).fit(build_module(**case["module"]), TokenData())
    return {"losses": _gathered(losses.values)}


def pieces(case: dict[str, Any]) -> dict[str, Any]:
    """Elements of each parameter on each rank, and in whole."""
    trainer, module, _ = train(case, 1)
    sizes = {name: [p.numel(), p.to_local().numel()] for name, p in module.named_parameters()}
    states = trainer.optimizers[0].state
    kept = {name: states[p]["exp_avg"].to_local().numel() for name, p in module.named_parameters()}
    return {"sizes": sizes, "states": kept, "all": _gathered(kept)}


def logits(case: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and write the logits that the divided model computes."""
    trainer, module, _ = train(case, HALF)
    trainer.save_checkpoint(Path(case["folder"]) / "half.ckpt")
    module.eval()
    with torch.no_grad():
        found = module(input_ids=torch.stack([Tokens()[index]["input_ids"] for index in range(BATCH)])).logits
    if trainer.is_global_zero:
        torch.save(found, Path(case["folder"]) / "logits.pt")
    distributed.barrier()
    return {}
