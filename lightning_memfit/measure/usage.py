"""`UsageSampler`: memory of a run by category and place, as figures for the loggers, with the largest ones kept."""

import torch
from lightning.pytorch import Trainer

from lightning_memfit.measure.holdings import held_bytes
from lightning_memfit.memory import GIB, Tier
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.memory.process import nvml_usage, pinned_bytes, rss_bytes, swapped_out_bytes


class UsageSampler:
    """Samples of what a run uses. Taking one goes over the tensors of module and optimizers: microseconds each.

    Args:
        device: The run's.

    Attributes:
        largest: Largest bytes of all samples: of `process` and `card` (NVML), `host` (what module and optimizers hold
            beside the device), `pinned`, `swap` and `disk`. What is not known is not there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.largest: dict[str, int] = {}

    def read(self, trainer: Trainer, ledger: StorageLedger | None) -> dict[str, float]:
        """Take a sample.

        Args:
            trainer: In training.
            ledger: What follows live tensors, if anything does.

        Returns:
            `memory/...`, in GiB.
        """
        held = held_bytes(trainer.lightning_module, trainer.optimizers, self.device)
        sizes: dict[str, int | None] = {f"{category}": size for category, size in held.by_category().items()}
        peak = self._peaks(sizes, ledger)
        if peak is not None:
            sizes["working_peak"] = max(0, peak - held.total())
        host = held.total(Tier.HOST) + held.total(Tier.PINNED_HOST)
        self._keep("host", host or None, sizes)
        self._keep("pinned", pinned_bytes(), sizes)
        self._keep("swap", swapped_out_bytes(), sizes)
        self._keep("disk", getattr(trainer.strategy, "swapped_bytes", None), sizes)
        self._read_nvml(sizes)
        sizes["rss"] = rss_bytes()
        return {f"memory/{name}_gib": size / GIB for name, size in sizes.items() if size is not None}

    def read_driver(self) -> None:
        """Ask NVML once more, for the largest figures."""
        self._read_nvml({})

    def _peaks(self, sizes: dict[str, int | None], ledger: StorageLedger | None) -> int | None:
        """Peaks of live tensors since the run began."""
        if ledger is not None:
            sizes |= {f"{category}_peak": size for category, size in ledger.peak_by_category.items() if size}
            sizes["live_peak"] = ledger.peak_bytes
        if self.device.type != "cuda":
            return None if ledger is None else ledger.peak_bytes
        peak = torch.cuda.max_memory_allocated(self.device)
        sizes |= {"allocated_peak": peak, "reserved_peak": torch.cuda.max_memory_reserved(self.device)}
        sizes["allocated"] = torch.cuda.memory_allocated(self.device)
        sizes["reserved"] = torch.cuda.memory_reserved(self.device)
        return peak

    def _read_nvml(self, sizes: dict[str, int | None]) -> None:
        if self.device.type == "cuda" and (usage := nvml_usage(self.device)) is not None:
            self._keep("process", usage.process_bytes, sizes)
            self._keep("card", usage.card_bytes, sizes)

    def _keep(self, name: str, size: int | None, sizes: dict[str, int | None]) -> None:
        """Note a size, and the largest of its name."""
        if size is not None:
            sizes[name] = size
            self.largest[name] = max(size, self.largest.get(name, 0))
