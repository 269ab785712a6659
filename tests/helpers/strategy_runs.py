"""Train a small GPT-2 under a strategy and with a plain loop in torch; run as a script, once per rank.

`python -m tests.helpers.strategy_runs CASES.json RESULTS.json` runs all cases in one process per rank, started by
Lightning's launcher or by torchrun, as a user would.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_memfit.profile.quiet import SILENT_TRAINER

CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 128,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LEARNING_RATE, WEIGHT_DECAY, BATCH = 1e-3, 0.1, 2
ZERO: dict[str, dict[str, Any]] = {
    "stage_1": {"stage": 1},
    "stage_2": {"stage": 2},
    "stage_3": {"stage": 3},
    "offload": {"stage": 2, "offload_optimizer": True},
}
"""Arguments of `ZeroStrategy`, by a name."""

CLIP = 2.5  # gradient norms fall from 3.3 to 1.8: some steps are clipped, and others not


class Tokens(Dataset):
    """Random tokens of a narrow range, so that there is something to learn."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 16, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Losses(pl.Callback):
    """The loss of every micro-batch, averaged over ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].detach().float() * trainer.accumulate_grad_batches  # Lightning has divided it
        self.values.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))


def build_module(**options: Any) -> pl.LightningModule:
    from lightning_memfit.models import CausalLM

    options = {"config": CONFIG, "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY} | options
    return CausalLM(min_learning_rate_fraction=1.0, **options)


def build_trainer(case: dict[str, Any], *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    import lightning_memfit.strategies  # noqa: F401  registers the names

    strategy = case["strategy"]
    if isinstance(strategy, dict):
        module, _, name = strategy["class_path"].rpartition(".")
        strategy = getattr(importlib.import_module(module), name)(**strategy.get("init_args", {}))
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=case.get("devices", 1),
        num_nodes=case.get("num_nodes", 1),
        precision=case.get("precision", "32-true"),
        max_steps=options.pop("max_steps", case.get("steps", 4)),
        accumulate_grad_batches=case.get("accumulate", 1),
        gradient_clip_val=case.get("clip"),
        callbacks=[*callbacks, *map(build_callback, case.get("callbacks", []))],
        **{"logger": False, **SILENT_TRAINER, **options},
    )


def build_callback(entry: dict[str, Any]) -> pl.Callback:
    module, _, name = entry["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**entry.get("init_args", {}))


class TokenData(pl.LightningDataModule):
    """The samples in order, dealt to the data-parallel ranks in turn; Lightning's own sampler would shuffle them."""

    def train_dataloader(self) -> DataLoader:
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(Tokens(), shuffle=False, **placement)
        return DataLoader(Tokens(), batch_size=BATCH, sampler=sampler)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def plain_losses(case: dict[str, Any]) -> list[float]:
    """The same training in plain torch, on the batches of all ranks, with fp32 master weights in half precision."""
    from lightning_memfit.models.optimizer import weight_decay_groups

    ranks, accumulate = case.get("devices", 1) * case.get("num_nodes", 1), case.get("accumulate", 1)
    ranks //= case.get("together", 1)  # ranks that compute on one batch
    torch.manual_seed(0)
    module = build_module(**case.get("module", {}))
    is_half = case.get("precision", "32-true").startswith("bf16")
    # Transformers 5.17 draws in the type in which a module is built, later versions in fp32.
    torch.set_default_dtype(torch.bfloat16 if is_half and _is_built_in_half(case) else torch.float32)
    module.configure_model()
    torch.set_default_dtype(torch.float32)
    names = [name for name, _ in module.named_parameters()]
    masters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    if is_half:
        module.bfloat16()
        masters = {name: parameter.detach().float() for name, parameter in module.named_parameters()}
    parameters = dict(module.named_parameters())
    groups = weight_decay_groups(module, WEIGHT_DECAY)
    ids = {id(parameter): name for name, parameter in parameters.items()}
    for group in groups:
        group["params"] = [masters[ids[id(parameter)]].requires_grad_() for parameter in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    data, losses = Tokens(), []
    for step in range(case.get("steps", 4)):
        for micro in range(step * accumulate, (step + 1) * accumulate):
            mean = 0.0
            for rank in range(ranks):
                rows = [data[(micro * BATCH + j) * ranks + rank] for j in range(BATCH)]
                loss = module(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
                (loss / (ranks * accumulate)).backward()
                mean += loss.item() / ranks
            losses.append(mean)
        for name in names:
            masters[name].grad = parameters[name].grad.float()
            parameters[name].grad = None
        if case.get("clip"):
            torch.nn.utils.clip_grad_norm_(masters.values(), case["clip"])
        optimizer.step()
        with torch.no_grad():
            for name in names:
                parameters[name].copy_(masters[name])
    return losses


def _is_built_in_half(case: dict[str, Any]) -> bool:
    """Whether a run builds its module in half precision rather than converting it: a "true" one, or within ZeRO-3."""
    strategy = case["strategy"]
    stage = strategy.get("init_args", {}).get("stage") if isinstance(strategy, dict) else strategy[-1]
    return case["precision"].endswith("true") or str(stage) == "3"


def fit(case: dict[str, Any]) -> dict[str, Any]:
    losses = Losses()
    pl.seed_everything(0, verbose=False)
    trainer, module = build_trainer(case, losses), build_module(**case.get("module", {}))
    trainer.fit(module, TokenData())
    return {"losses": losses.values, "plain": plain_losses(case)}


def run(case: dict[str, Any]) -> dict[str, Any]:
    module, _, name = case.get("scenario", f"{__name__}.fit").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(case)
    except Exception as error:
        if case.get("expect_error"):
            return {"error": f"{type(error).__name__}: {error}"}
        raise


def main(cases_file: str, results_file: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, case in json.loads(Path(cases_file).read_text()).items():
        start = time.monotonic()
        results[name] = run(case)
        ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
        if int(next((rank for rank in ranks if rank is not None), 0)) == 0:
            Path(results_file).write_text(json.dumps(results))
            print(f"done {name} in {time.monotonic() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
