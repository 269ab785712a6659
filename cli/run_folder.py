"""The one new folder of a run, for its configuration and checkpoints, whatever the logger is.

Lightning's own loggers make one per run, and so has everything else beside them. With others, as W&B's, and without a
logger, Lightning would write every run's configuration to the same place. At an address (`s3://...`) all is left to it.
"""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override


class SaveConfig(SaveConfigCallback):
    """Saves the configuration in the run's folder, also where the logger's folder is one for all runs.

    It has no hook of its own: those of callbacks from outside the package run in traces.

    Attributes:
        folder: The run's folder; None leaves the place to Lightning, which takes the first logger's.
    """

    folder: Path | None = None

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the configuration where there is a folder; called on the first rank alone."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = str(self.folder / self.config_filename)
            self.parser.save(self.config, path, skip_none=False, overwrite=self.overwrite, multifile=self.multifile)


def make_run_folder(trainer: Trainer) -> Path | None:
    """Give a run a folder of its own before anything runs; None if it has none, or it lies at an address.

    Only the first rank makes a folder; Lightning broadcasts its choice to the others (`ModelCheckpoint.setup`).
    """
    logger = next(iter(trainer.loggers), None)
    root = str(getattr(logger, "save_dir", None) or trainer.default_root_dir)
    if trainer.fast_dev_run or "://" in root:  # type: ignore[attr-defined]
        return None
    own = logger if isinstance(logger, (CSVLogger, TensorBoardLogger)) else None
    # Not of any logger: MLflow's asks a server for its name.
    name = getattr(logger, "name", None) if type(logger).__name__ == "WandbLogger" else None
    path = Path((own or CSVLogger(root, name or "lightning_logs")).log_dir)
    if own is not None:
        return path
    if _is_first(trainer.num_nodes):
        path.mkdir(parents=True)  # at once, so that no other run takes the same number
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SaveConfig):
            callback.folder, callback.save_to_log_dir = path, False
        elif isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(path.absolute() / "checkpoints")
    return path


def has_begun(trainer: Trainer) -> bool:
    """Whether an optimizer step, a batch of training, or one of an evaluation but the sanity check, was done."""
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        return True  # steps in processes that this one starts by fork or spawn aren't seen here
    training = trainer.fit_loop.epoch_loop
    if not training.restarting and (trainer.global_step > 0 or training.batch_progress.total.completed > 0):
        return True
    evaluations = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    return any(loop.batch_progress.total.completed > 0 for loop in evaluations)


def _is_first(num_nodes: int) -> bool:
    """Whether this process makes the run's folder.

    Where Lightning's own launcher is started on several machines, the first process of each has no rank yet.
    """
    machine = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return getattr(rank_zero_only, "rank", 0) == 0 and (num_nodes == 1 or machine == "0")
