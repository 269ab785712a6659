"""`global_batch_size` = loader batch x devices x `accumulate_grad_batches`, checked and where possible arranged."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memfit.memory.replicas import num_replicas


def share_of(trainer: Trainer, global_batch_size: int) -> int:
    """The batch size the loader of one device must have.

    Raises:
        MisconfigurationException: If the global batch can't be divided so.
    """
    parts = num_replicas(trainer) * trainer.accumulate_grad_batches
    if global_batch_size % parts:
        raise MisconfigurationException(
            f"`global_batch_size={global_batch_size}` can't be divided by {num_replicas(trainer)} devices x "
            f"`accumulate_grad_batches={trainer.accumulate_grad_batches}`. Take a multiple of {parts}."
        )
    return global_batch_size // parts


def lend_batch_size(trainer: Trainer, module: LightningModule, share: int) -> tuple[Any, int] | None:
    """Set `batch_size` of the datamodule or module that makes the loaders to the share.

    Returns:
        Its owner and the value it had, for putting back; None if there is none or it was right.
    """
    datamodule = getattr(trainer, "datamodule", None)
    if not trainer.fit_loop._data_source.is_module():
        return None
    for owner in (datamodule, module) if datamodule is not None else (module,):
        before = getattr(owner, "batch_size", None)
        if isinstance(before, int) and not isinstance(before, bool):
            if before == share:
                return None
            owner.batch_size = share
            rank_zero_info(f"MicroBatching: `batch_size` of the {type(owner).__name__} is {share} instead of {before}.")
            return owner, before
    return None


def loader_batch_size(trainer: Trainer) -> int | None:
    """Batch size of the training loader, None if it doesn't tell (or there are several)."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def check_global_batch(trainer: Trainer, global_batch_size: int, found: int) -> None:
    """Check the batch size that the loader delivers.

    Raises:
        MisconfigurationException: If the effective batch would be another than the one asked for.
    """
    share = share_of(trainer, global_batch_size)
    if found != share:
        accumulate, replicas = trainer.accumulate_grad_batches, num_replicas(trainer)
        raise MisconfigurationException(
            f"`global_batch_size={global_batch_size}`, but the training loader delivers {found} x {replicas} devices "
            f"x `accumulate_grad_batches={accumulate}` = {found * replicas * accumulate}. Set the loader's "
            f"`batch_size` to {share}; micro-batches are cut from it."
        )
