"""One run that saves and one that goes on from it, on this rank; `ranks` starts these functions on all ranks.

All runs see the same global batches, whatever their number of ranks, so that losses can be compared as well.
"""

import gc
import os
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memfit.profile.quiet import SILENT_TRAINER

SAVED_STEP, LAST_STEP, GLOBAL_BATCH = 3, 5, 12
CONFIG = {
    "n_layer": 3,
    "n_embd": 192,
    "n_head": 6,
    "vocab_size": 64,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
"""1.3 million parameters: on each of four ranks, a sub-group is still large enough to be put on disk."""

KINDS = (
    "single",
    "ddp",
    "fsdp2",
    "fsdp2_file",
    "tensor_parallel",
    "zero_1",
    "zero_2",
    "zero_3",
    "zero_offload",
    "zero_infinity",
)
WORLD_SIZES: dict[str, tuple[int, ...]] = dict.fromkeys(KINDS, (1, 2, 3, 4))
WORLD_SIZES |= {"single": (1,), "tensor_parallel": (2, 3, 4)}
SCALARS_REFUSED = ("fsdp2", "fsdp2_file", "tensor_parallel")
"""torch's FSDP2 refuses parameters without dimensions."""


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        optimizer: "adamw" or "sgd", with momentum.
        with_scalar: Have a parameter without dimensions, too.
    """

    optimizer: str
    with_scalar: bool

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.optimizer + "_scalar" * self.with_scalar


@dataclass(frozen=True)
class End:
    """A strategy on some ranks: where a checkpoint comes from, or where it goes."""

    kind: str
    world_size: int

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.kind}-{self.world_size}"


class Module(pl.LightningModule):
    """A small GPT-2 with tied embeddings, and optimizer groups that are not in the module's order."""

    def __init__(self, subject: Subject) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.subject = subject
        self.net = GPT2LMHeadModel(GPT2Config(**CONFIG))
        if subject.with_scalar:
            self.temperature = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.net(input_ids=batch).logits
        if self.subject.with_scalar:
            logits = logits / self.temperature
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        vectors = [p for _, p in reversed(named) if len(getattr(p, "ds_shape", p.shape)) < 2]
        attention = [p for name, p in named if len(getattr(p, "ds_shape", p.shape)) > 1 and "attn" in name]
        others = [p for name, p in named if len(getattr(p, "ds_shape", p.shape)) > 1 and "attn" not in name]
        adam = self.subject.optimizer == "adamw"
        scale = 1.0 if adam else 20.0
        groups: list[dict[str, Any]] = [
            {"params": vectors, "weight_decay": 0.0, "lr": 3e-3 * scale},
            {"params": others, "weight_decay": 0.1, "lr": 1e-3 * scale},
            {"params": attention, "weight_decay": 0.05, "lr": 2e-3 * scale},
        ]
        optimizer = torch.optim.AdamW(groups) if adam else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(pl.LightningDataModule):
    """The same global batch in every step, dealt to the data-parallel ranks: a loss then depends on states alone."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        share = GLOBAL_BATCH // placement["num_replicas"]
        ids = torch.randint(0, 32, (GLOBAL_BATCH, 16), generator=torch.Generator().manual_seed(3))
        own = ids[placement["rank"] :: placement["num_replicas"]]
        return DataLoader(own.repeat(LAST_STEP + 1, 1), batch_size=share)  # type: ignore[arg-type]


class Watch(pl.Callback):
    """Notes losses and, before the first step and after the saved one, weights and states by name."""

    def __init__(self, save_to: Path | None) -> None:
        self.save_to = save_to
        self.at_start: dict[str, Any] = {}
        self.at_save: dict[str, Any] = {}
        self.losses: dict[int, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.save_to is None:
            self.at_start = captured(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.losses[trainer.global_step] = float(loss)
        if self.save_to is not None and trainer.global_step == SAVED_STEP:
            trainer.save_checkpoint(self.save_to)
            self.at_save = captured(trainer, pl_module)


@torch.no_grad()
def captured(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Whole weights and states by name, step counts, and the options of all groups; a collective call."""
    optimizer = trainer.optimizers[0]
    optimizer = getattr(optimizer, "optimizer", optimizer)
    weights, states = {}, {}
    for name, parameter in module.named_parameters():
        weights[name], states[name] = _whole(parameter, module, trainer)
    options = sorted(
        str(sorted((key, round(float(group[key]), 12)) for key in ("lr", "weight_decay", "momentum") if key in group))
        for group in trainer.optimizers[0].param_groups
    )
    inner = _inner(trainer)
    steps = sorted({float(state["step"]) for state in inner.state.values() if "step" in state})
    schedule = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    return {"weights": weights, "states": states, "options": options, "steps": steps, "schedule": schedule}


def _inner(trainer: pl.Trainer) -> Any:
    engine = getattr(trainer.strategy, "_train_engine", None)
    return trainer.optimizers[0] if engine is None else engine.optimizer.optimizer


def _whole(parameter: Tensor, module: Any, trainer: pl.Trainer) -> tuple[Tensor, dict[str, Tensor]]:
    keys = ("exp_avg", "exp_avg_sq") if module.subject.optimizer == "adamw" else ("momentum_buffer",)
    engine = getattr(trainer.strategy, "_train_engine", None)
    if engine is not None and not hasattr(parameter, "ds_id"):
        return _joined(parameter, engine.optimizer, keys)
    if engine is not None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        shape = torch.Size(parameter.ds_shape)  # type: ignore[attr-defined]
        values = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        return (
            safe_get_full_fp32_param(parameter).clone().view(shape),
            {key: value.clone().view(shape) for key, value in values.items()},
        )
    state = trainer.optimizers[0].state[parameter]
    return _full(parameter), {key: _full(state[key]) for key in keys if key in state}


def _joined(parameter: Tensor, zero: Any, keys: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Under stages 1 and 2, what all ranks hold of a group, of which a parameter is a part."""
    for number, group in enumerate(zero.round_robin_bit16_groups):
        for one, offset in zip(group, zero.round_robin_bit16_offsets[number], strict=True):
            if one is parameter:
                master = zero.single_partition_of_fp32_groups[number]
                found = []
                for part in (master, *(zero.optimizer.state[master][key] for key in keys)):
                    parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())]
                    torch.distributed.all_gather(parts, part.detach())
                    found.append(torch.cat(parts)[offset : offset + one.numel()].view(one.shape).clone())
                return found[0], dict(zip(keys, found[1:], strict=True))
    raise KeyError


def _full(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def _strategy(end: End, drive: Path) -> Any:
    from datetime import timedelta

    from lightning.pytorch.strategies import SingleDeviceStrategy

    from lightning_memfit import strategies

    together = 2 if end.world_size == 4 else end.world_size
    zero = {f"zero_{stage}": {"stage": stage} for stage in (1, 2, 3)} | {
        "zero_offload": {"stage": 2, "offload_optimizer": True}
    }
    if end.kind == "single":
        return SingleDeviceStrategy(torch.device("cpu"))
    if end.kind in zero:
        return strategies.ZeroStrategy(**zero[end.kind], timeout=timedelta(seconds=60))  # type: ignore[arg-type]
    if end.kind == "zero_infinity":
        return strategies.ZeroInfinityStrategy(str(drive), disk_reserve="16MiB", timeout=timedelta(seconds=60))
    common: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=60)}
    if end.kind == "ddp":
        return strategies.DataParallelStrategy(**common)
    if end.kind == "tensor_parallel":
        common["tensor_parallel_size"] = together
    return strategies.FullyShardedStrategy(**common, save_distributed_checkpoint=end.kind != "fsdp2_file")


def trained(end: End, subject: Subject, folder: Path, source: Path | None) -> Watch:
    """Train under one strategy: to the end with a save in between, or from a checkpoint to the end."""
    for name, value in RANK.items():
        os.environ[name] = value
    from lightning_memfit.strategies import AtomicCheckpointIO

    watch = Watch(folder / "half.ckpt" if source is None else None)
    torch.manual_seed(11)
    drive = folder / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=end.world_size,
        strategy=_strategy(end, drive),
        max_steps=LAST_STEP,
        callbacks=[watch],
        logger=False,
        plugins=[AtomicCheckpointIO()] if end.kind == "single" else [],
        **SILENT_TRAINER,
    )
    trainer.fit(Module(subject), Data(), ckpt_path=None if source is None else str(source))
    return watch


RANK: dict[str, str] = {}
"""What the environment of this rank says, which Lightning takes away after a run."""


def _remember() -> int:
    names = ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    RANK.update({name: os.environ[name] for name in names})
    return int(RANK["RANK"])


def save_all(ends: list[End], subject: Subject, folder: Path) -> dict[str, str]:
    """Save a checkpoint of each end and what was in memory then; returns what failed."""
    rank, failed = _remember(), {}
    for end in ends:
        place = folder / subject.name / end.name
        try:
            watch = trained(end, subject, place, None)
        except Exception as error:
            traceback.print_exc()
            failed[end.name] = f"{type(error).__name__}: {error}"
            continue
        if rank == 0:
            torch.save({"captured": watch.at_save, "losses": watch.losses}, place / "expected.pt")
    return failed


def resume_all(cells: list[tuple[End, End]], subject: Subject, folder: Path) -> Iterator[dict[str, Any]]:
    """Go on from each source under each target; returns a row for each."""
    gc.freeze()  # DeepSpeed collects garbage in every run
    rank, rows = _remember(), []
    for number, (source, target) in enumerate(cells):
        place = folder / subject.name / source.name
        row: dict[str, Any] = {"source": asdict(source), "target": asdict(target), "subject": subject.name}
        try:
            watch = trained(target, subject, folder / "targets" / f"{target.name}-{number}", place / "half.ckpt")
        except Exception as error:
            traceback.print_exc()
            row |= {"verdict": "refused", "words": f"{type(error).__name__}: {error}"}
        else:
            row |= compared(watch, place / "expected.pt") if rank == 0 else {}
        rows.append(row)
        if rank == 0:
            torch.save(rows, folder / f"rows-{subject.name}-{target.world_size}.pt")
    return rows  # type: ignore[return-value]


def compared(watch: Watch, expected: Path) -> dict[str, Any]:
    """Say what differs between the run that went on and the one that saved."""
    saved = torch.load(expected, weights_only=True)
    was, now = saved["captured"], watch.at_start
    different = [name for name in was["weights"] if not _equal(was["weights"][name], now["weights"][name])]
    for name, states in was["states"].items():
        found = now["states"][name]
        different += [f"{key} of {name}" for key in states if key not in found or not _equal(states[key], found[key])]
    different += [key for key in ("options", "steps", "schedule") if was[key] != now[key]]
    later = {step: loss for step, loss in saved["losses"].items() if step > SAVED_STEP}
    gap = max((abs(watch.losses.get(step, float("nan")) - loss) for step, loss in later.items()), default=float("nan"))
    verdict = "exact" if not different and gap < 2e-5 else "different"
    return {"verdict": verdict, "different": different[:5], "num_different": len(different), "loss_gap": gap}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float(), other.float())
