"""`RunFolder`: what a run writes beside its checkpoints, which a run that never began must not leave behind."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lightning_memfit.memory.wrapping import wrap_method

_OF_A_START = ("config.yaml", "hparams.yaml", "metrics.csv", "events.out.tfevents.")
"""Beginnings of the names of files that a run writes before its first step."""

_STEPS = ("optimizer_step", "validation_step", "test_step", "predict_step")


class RunFolder:
    """Removes the folders of a run that ended before its first step was done, if this run has made them.

    It is no callback: the steps of callbacks are part of what a trace copies.

    Args:
        trainer: The Trainer, before it runs anything.

    Attributes:
        began: Whether an optimizer step, or a step of an evaluation other than the sanity check, was done.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.began = False
        self._trainer = trainer
        roots = [Path(root) for logger in trainer.loggers if (root := getattr(logger, "root_dir", None))]
        self._existed = {path for root in roots for path in (root, *root.parents, *_children(root)) if path.exists()}
        for name in _STEPS:
            wrap_method(trainer.strategy, name, self._note)

    def _note(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.began |= not self._trainer.sanity_checking
        return result

    def remove_if_unused(self) -> None:
        """Remove the run's folders, and those above them that are now empty, if no step was done."""
        if self.began or not self._trainer.is_global_zero:
            return
        for logger in self._trainer.loggers:
            folder = getattr(logger, "log_dir", None)
            if folder is None or not Path(folder).is_dir() or Path(folder) in self._existed:
                continue
            if self._is_ours(Path(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                for above in Path(folder).parents:
                    if above in self._existed:
                        break
                    with contextlib.suppress(OSError):
                        above.rmdir()

    def _is_ours(self, folder: Path) -> bool:
        """Whether it holds what this run wrote before its first step, and nothing else.

        A run that started at the same moment may have taken the same number; then the configuration is its own.
        """
        saved = [c for c in self._trainer.callbacks if isinstance(c, SaveConfigCallback)]  # type: ignore[attr-defined]
        if (folder / "config.yaml").exists() and not any(callback.already_saved for callback in saved):
            return False
        files = [path for path in folder.rglob("*") if not path.is_dir()]
        return all(path.name.startswith(_OF_A_START) for path in files)


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
