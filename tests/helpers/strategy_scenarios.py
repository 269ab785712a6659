"""What a user does besides training: save, resume, evaluate, export. Run by `strategy_runs`, on every rank."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.helpers.strategy_runs import Losses, TokenData, build_module, build_trainer, plain_losses

STEPS, HALF = 4, 2


def train(case: dict[str, Any], steps: int, ckpt_path: str | None = None) -> tuple[pl.Trainer, Any, list[float]]:
    pl.seed_everything(0, verbose=False)
    losses = Losses()
    trainer, module = build_trainer(case, losses, max_steps=steps), build_module(**case.get("module", {}))
    trainer.fit(module, TokenData(), ckpt_path=ckpt_path)
    return trainer, module, losses.values


def save(case: dict[str, Any]) -> dict[str, Any]:
    """Train in one go; train half of it, save twice to one path, and say what a validation gives there."""
    _, _, whole = train(case, STEPS)
    trainer, module, first = train(case, HALF)
    path = Path(case["folder"]) / "half.ckpt"
    for _ in range(2):
        trainer.save_checkpoint(path)
    trainer.limit_val_batches = trainer.limit_test_batches = trainer.limit_predict_batches = 2
    validated = trainer.validate(module, TokenData(), verbose=False)
    tested = trainer.test(module, TokenData(), verbose=False)
    predicted = trainer.predict(module, TokenData())
    return {
        "whole": whole,
        "first": first,
        "val_loss": validated[0]["val_loss"],
        "test_loss": tested[0]["test_loss"],
        "predicted": [list(ids.shape) for ids in predicted],
        "left": sorted(file.name for file in Path(case["folder"]).iterdir()),
    }


def planned(case: dict[str, Any]) -> dict[str, Any]:
    """Train by `MemFit`, and say what every rank knows of the plan, and which of them has made one."""
    from lightning_memfit.device.limit import MemoryLimit
    from lightning_memfit.fitting import auto

    made: list[int] = []
    make_plan = auto.make_plan

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        return make_plan(*arguments, **options)

    automatic, losses, error = auto.MemFit(allow=["exact"]), Losses(), ""
    auto.make_plan = noted
    pl.seed_everything(0, verbose=False)
    try:
        trainer = build_trainer(case, automatic, MemoryLimit(case["limit"]), losses)
        trainer.fit(build_module(), TokenData())
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        auto.make_plan = make_plan
    own = {"made": len(made), "plan": None if automatic.plan is None else automatic.plan.to_dict(), "error": error}
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, own)
    return {"ranks": ranks, "losses": losses.values, "plain": plain_losses(case)}


def until_killed(case: dict[str, Any]) -> dict[str, Any]:
    """Train, and save every second step as a user's callback does, until somebody ends it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    pl.seed_everything(0, verbose=False)
    save = ModelCheckpoint(case["folder"], "half", every_n_train_steps=HALF, save_top_k=-1)
    trainer = build_trainer(case, save, max_steps=100_000, enable_checkpointing=True)
    trainer.fit(build_module(**case.get("module", {})), TokenData())
    return {}


def resume(case: dict[str, Any]) -> dict[str, Any]:
    _, _, losses = train(case, STEPS, ckpt_path=str(Path(case["folder"]) / "half.ckpt"))
    return {"losses": losses}


def validate(case: dict[str, Any]) -> dict[str, Any]:
    """Evaluate a checkpoint without training."""
    pl.seed_everything(1, verbose=False)
    trainer, module = build_trainer(case, limit_val_batches=2), build_module(**case.get("module", {}))
    path = str(Path(case["folder"]) / "half.ckpt")
    return {"val_loss": trainer.validate(module, TokenData(), ckpt_path=path, verbose=False)[0]["val_loss"]}


def validate_all(case: dict[str, Any]) -> dict[str, Any]:
    """Evaluate a checkpoint on one rank, over the batches that several had."""
    pl.seed_everything(1, verbose=False)
    trainer, module = build_trainer(case, limit_val_batches=2 * case["ranks"]), build_module(**case.get("module", {}))
    path = str(Path(case["folder"]) / "half.ckpt")
    return {"val_loss": trainer.validate(module, TokenData(), ckpt_path=path, verbose=False)[0]["val_loss"]}


def fit_twice(case: dict[str, Any]) -> dict[str, Any]:
    """A second `fit` goes on from the weights with a new optimizer, as it does on one device."""
    trainer, module, first = train(case, HALF)
    trainer.fit_loop.epoch_loop.max_steps = STEPS
    trainer.callbacks[0].values = second = []
    trainer.fit(module, TokenData())
    return {"first": first, "second": second}


def evaluate_whole(folder: str, ranks: int) -> float:
    """The validation loss of a consolidated checkpoint in plain torch, over what two batches per rank hold."""
    from lightning_memfit.models.trained import network_from_checkpoint
    from lightning_memfit.strategies.checkpoint_io import consolidated
    from tests.helpers.strategy_runs import BATCH, Tokens

    network = network_from_checkpoint(consolidated(folder))
    rows = [Tokens()[index]["input_ids"] for index in range(2 * BATCH * ranks)]
    with torch.no_grad():
        return float(network(input_ids=torch.stack(rows), labels=torch.stack(rows)).loss)


def epochs(case: dict[str, Any]) -> dict[str, Any]:
    """Train two epochs whose batches accumulation doesn't divide: the last window of each has fewer."""
    pl.seed_everything(0, verbose=False)
    losses = Losses()
    trainer = build_trainer(case, losses, max_steps=-1, max_epochs=2, limit_train_batches=case["batches"])
    trainer.fit(build_module(**case.get("module", {})), TokenData())
    return {"losses": losses.values, "steps": trainer.global_step}
