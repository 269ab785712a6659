"""`DataLoading`: worker processes prepare batches during training, in the same order as without workers."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.techniques.core.callback import Refusal, ReversibleCallback
from lightning_memfit.techniques.core.facts import LoaderFacts, Run, flat_loaders
from lightning_memfit.techniques.core.first_batch import training_data_source
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

_PREFETCHED = 2
"""Batches that a worker prepares ahead; torch's default."""


class DataLoading(ReversibleCallback):
    """Set workers and pinned memory of the training loaders for a run. Samples and their order stay the same.

    Torch's workers run ahead of training: from the second epoch on, a sampler with a generator of its own, and
    persistent workers of a loader that shuffles, give another order. A data set that draws random numbers in
    `__getitem__` draws other numbers in worker processes than in the main process, as always in torch.

    Args:
        num_workers: Processes per loader.
        pin_memory: Batches in page-locked memory, copied to CUDA during computation. None decides by the device.
        persistent_workers: Keep the processes from epoch to epoch; they end with the run.

    Raises:
        ValueError: If `num_workers` is negative.
    """

    def __init__(self, num_workers: int = 2, pin_memory: bool | None = None, persistent_workers: bool = False) -> None:
        super().__init__()
        if num_workers < 0:
            raise ValueError(f"`num_workers={num_workers}` must not be negative.")
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers and num_workers > 0

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the method from which the Trainer gets its training loaders."""
        pin = DeviceKind.of(trainer.strategy.root_device).has_own_memory if self.pin_memory is None else self.pin_memory

        def loaders(inner: Callable[[], Any]) -> Any:
            source = inner()
            found = flat_loaders(source)
            for loader in found:
                reason = refusal(LoaderFacts.of(loader), self.num_workers)
                if reason is not None:
                    raise Refusal(f"DataLoading: {reason}")
            for loader in found:
                self.on_restore(self._set(loader, pin))
            self.announce(f"{len(found)} training loader(s) with {self.num_workers} workers, pin_memory={pin}")
            return source

        self.on_restore(wrap_method(training_data_source(trainer), "dataloader", loaders))

    def _set(self, loader: DataLoader[Any], pin: bool) -> Callable[[], None]:
        """Set a loader up and return a function that restores it.

        torch guards `persistent_workers` against assignment after construction; before an iterator exists, setting it
        has the same effect as passing it to the constructor.
        """
        attributes = vars(loader)
        changes = {
            "num_workers": self.num_workers,
            "prefetch_factor": (loader.prefetch_factor or _PREFETCHED) if self.num_workers else None,
            "pin_memory": pin,
            "persistent_workers": self.persistent_workers,
        }
        before = {name: attributes[name] for name in changes}
        attributes.update(changes)

        def put_back() -> None:
            attributes["_iterator"] = None  # ends persistent workers
            attributes.update(before)

        return put_back


def refusal(loader: LoaderFacts, num_workers: int) -> str | None:
    """Reason and fix, or None if a loader can have workers."""
    if not loader.settable:
        return f"{loader.name} is no torch DataLoader, whose workers could be set. Leave DataLoading out."
    if loader.iterable and num_workers > 1:
        return (
            f"{loader.iterable} is an IterableDataset, of which every worker would give all samples, or another order. "
            "Set num_workers=1, or leave DataLoading out."
        )
    return None


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if loaders can be set up."""
    reasons = (refusal(loader, int(options.get("num_workers", 2))) for loader in run.facts.loaders)
    return next((reason for reason in reasons if reason is not None), None)


TECHNIQUE = Technique(
    name="data_loading",
    kind="loader",
    summary="worker processes and pinned memory for the training loader, data and order unchanged",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.data_loading.DataLoading"),),
    unsupported=unsupported,
    traced=False,
    changes_step=False,
)
