"""What a run on auto planned, and what it then needed."""

import json
from pathlib import Path

import lightning.pytorch as pl

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting.auto import MemFit
from lightning_memfit.planner.plan import label


class PlanRecord(pl.Callback):
    """Write plan and peak to a file when training ends.

    Args:
        path: Of the JSON file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the plan off `MemFit` and the peak off `MemoryLimit`."""
        [auto] = [c for c in trainer.callbacks if isinstance(c, MemFit)]
        [limit] = [c for c in trainer.callbacks if isinstance(c, MemoryLimit)]
        assert auto.plan is not None
        assert auto.plan.setting is not None
        assert limit.ledger is not None
        record = {
            "num_parameters": sum(p.numel() for p in pl_module.parameters()),
            "limit_bytes": limit.limit_bytes,
            "setting": label(auto.plan.setting),
            "plan": auto.plan.setting.to_dict(),
            "needed_bytes": auto.plan.needed_bytes,
            "predicted_bytes": auto.plan.peak_bytes,
            "measured_bytes": limit.ledger.peak_bytes,
            "predicted_step_seconds": auto.plan.seconds_per_step,
        }
        Path(self.path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
