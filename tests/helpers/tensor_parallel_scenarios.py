"""What tensor parallelism must not get wrong without a word. Run by `strategy_runs`, on every rank."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import distributed
from torch.utils.data import DataLoader

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


class Seen(pl.Callback):
    """The first numbers of the batches of this rank."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["input_ids"][:, :6].flatten().tolist())


class Shuffled(pl.LightningDataModule):
    """Left to Lightning's sampler."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(), batch_size=BATCH, shuffle=True)


def lightnings_sampler(case: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    seen = Seen()
    build_trainer(case, seen, use_distributed_sampler=True).fit(build_module(), Shuffled())
    return {"seen": _gathered(seen.seen)}


def packaged_data(case: dict[str, Any]) -> dict[str, Any]:
    """The package's own data modules deal to data-parallel ranks, and count these alone as the global batch."""
    from lightning_memfit.data import StandardLibraryText

    pl.seed_everything(0, verbose=False)
    seen = Seen()
    data = StandardLibraryText(tokenizer="bytes", sequence_length=32, batch_size=2, max_files=3, global_batch_size=4)
    build_trainer(case, seen).fit(build_module(**case["module"]), data)
    return {"seen": _gathered(seen.seen)}


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


class KeptForBackward(pl.Callback):
    """What the first forward pass keeps for backward. It is held, so that no address is used twice.

    Parameters are left out; those that FSDP2 had gathered are empty afterwards.
    """

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._hooks: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        owned = {p.to_local().untyped_storage().data_ptr() for p in module.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned and not isinstance(tensor, torch.nn.Parameter):
                self.storages[storage.data_ptr()] = storage
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self._hooks.__exit__(None, None, None)


def kept(case: dict[str, Any]) -> dict[str, Any]:
    """The bytes for a model of two layers and of three."""
    found = []
    for layers in (2, 3):
        pl.seed_everything(0, verbose=False)
        counter = KeptForBackward()
        module = build_module(config={**case["module"]["config"], "n_layer": layers})
        build_trainer(case, counter, max_steps=1).fit(module, TokenData())
        found.append(sum(storage.nbytes() for storage in counter.storages.values()))
    return {"bytes": found}
