"""`RunFolder`: the one new folder of a run, for its configuration, logs and checkpoints, whatever the logger is.

A run that never began leaves none behind. At an address (`s3://...`) only Lightning makes folders, for its own loggers.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_memfit.memory.wrapping import wrap_method

_OF_A_START = ("config.yaml", "hparams.yaml", "metrics.csv", "events.out.tfevents.")
"""Beginnings of the names of files that a run writes before its first step."""

_FIGURES_OF_A_START = {"epoch", "step", "micro_batch_size"}
"""Columns of a `metrics.csv` that are there before the first step: `MicroBatching` logs the size that it has chosen."""

_STEPS = ("optimizer_step", "validation_step", "test_step", "predict_step")

_VERSIONED = ("CSVLogger", "TensorBoardLogger")
"""Lightning's loggers that make a folder per run themselves, `save_dir/name/version_N`."""

_LIGHTNINGS = ("lightning", "pytorch_lightning")
"""Packages of loggers whose folders follow from their arguments. Others are asked once they are made."""

_DEFAULT_NAME = "lightning_logs"


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
            self.parser.save(
                self.config,
                str(self.folder / self.config_filename),
                skip_none=False,
                overwrite=self.overwrite,
                multifile=self.multifile,
            )


class RunFolder:
    """Makes a run's folder before its loggers exist, and removes it if the run ends before its first step was done.

    It is no callback: the steps of callbacks are part of what a trace copies.

    The folder is `save_dir/name/version_N` as of Lightning's own loggers (with W&B, `name` is the project), that of the
    first logger where its class is the user's own (`log_dir`, or what `save_dir`, `name` and `version` say), and
    `lightning_logs/version_N` where there is no logger, or another that has no folders per run. It is made at once, so
    that no other run takes the same number. Only the first rank makes it; Lightning broadcasts its choice to the others
    (`ModelCheckpoint.setup`, `Trainer.log_dir`).

    Args:
        config: The `trainer` section of a configuration, before anything is instantiated. Its `logger` is replaced.

    Attributes:
        path: The folder; None where Lightning's own default makes one, or the user has named a version.
        began: Whether an optimizer step, a batch of training, or a step of an evaluation other than the sanity check,
            was done.
    """

    def __init__(self, config: Namespace) -> None:
        self.began = False
        self._is_first = _is_first(config)
        self.path: Path | None = None
        self._is_users_choice = False
        self._default_root = Path(config.get("default_root_dir") or ".")
        self._asks_logger = False
        self._trainer: Trainer | None = None
        self._made: list[Path] = []
        self._config, self._as_written = config, config.get("logger")
        if not config.get("fast_dev_run") and not _goes_to_address(config):
            self._claim(self._default_root)

    def _claim(self, default_root: Path) -> None:
        """Choose the folder, make it, and write it into the configuration of the loggers."""
        logger = self._as_written
        if logger is None or logger is True:
            self._make(default_root / _DEFAULT_NAME, _default_root(default_root))
            return  # Lightning's default, which makes a folder per run
        loggers = [Namespace(vars(spec)) for spec in (logger if isinstance(logger, list) else [logger]) if spec]
        for spec in loggers:
            spec.init_args = Namespace(vars(spec.get("init_args") or Namespace()))
        root, name, option = default_root, _DEFAULT_NAME, _default_root(default_root)
        if loggers and not _is_lightnings(loggers[0]):
            self._asks_logger = True
            return
        if loggers and loggers[0].init_args.get("save_dir"):
            option = f"`save_dir={loggers[0].init_args.save_dir!r}` of {_kind(loggers[0])}"
        if loggers and _kind(loggers[0]) in _VERSIONED:
            options = loggers[0].init_args
            root, name = Path(options.get("save_dir") or default_root), options.get("name", _DEFAULT_NAME) or ""
            if options.get("version") is not None:
                version, self._is_users_choice = options.version, True
                self._make(root / name, option)
                self.path = root / name / _version_folder(version)
            else:
                self.path = self._new(root / name, option)
                options.version = int(self.path.name.removeprefix("version_"))
        elif loggers and _kind(loggers[0]) == "WandbLogger":
            options = loggers[0].init_args
            root, name = Path(options.get("save_dir") or default_root), options.get("project") or _DEFAULT_NAME
            self.path = self._new(root / name, option)
        else:
            self.path = self._new(root / name, option)
        for spec in loggers:
            if _kind(spec) == "WandbLogger":
                spec.init_args.save_dir = str(self.path)
        if loggers:
            self._config.logger = loggers if isinstance(logger, list) else loggers[0]

    def _make(self, folder: Path, option: str) -> None:
        """Make a folder, and those above it, on the first rank.

        Args:
            folder: The folder.
            option: The option that names it or one above it, with its value, for messages.

        Raises:
            ValueError: If it can't be made.
        """
        for one in reversed([folder, *folder.parents]) if self._is_first else ():
            try:
                if not one.exists():
                    one.mkdir(exist_ok=True)
                    self._made.append(one)
                elif not one.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "it is a file")
            except OSError as error:
                raise _unusable(option, one, error) from error

    def _new(self, parent: Path, option: str) -> Path:
        """Make the next `version_N`, and the folders above it; on other ranks than the first only name it."""
        numbers = [int(found[1]) for path in _children(parent) if (found := re.fullmatch(r"version_(\d+)", path.name))]
        number = max(numbers, default=-1) + 1
        if not self._is_first:
            return parent / f"version_{number}"
        while not self._makes(parent / f"version_{number}", option):
            number += 1
        return self._made[-1]

    def _makes(self, folder: Path, option: str) -> bool:
        """Make a folder, and those above it; False if it is another run's, from this moment."""
        self._make(folder.parent, option)
        try:
            folder.mkdir()
        except FileExistsError:
            return False
        except OSError as error:
            raise _unusable(option, folder, error) from error
        self._made.append(folder)
        return True

    def _ask(self, logger: Any) -> None:
        """Take the folder of a logger of the user's own class, whose arguments don't say where it writes."""
        folder = _told(logger, "log_dir")
        save_dir = _told(logger, "save_dir")
        option = f"`{'save_dir' if folder is None else 'log_dir'}` of {type(logger).__name__}"
        if "://" in str(folder or save_dir):
            return
        if folder is not None:
            self.path = Path(folder)
            self._is_users_choice = self._is_first and not self._makes(self.path, option)
            return
        if save_dir is None:
            self.path = self._new(self._default_root / _DEFAULT_NAME, _default_root(self._default_root))
            return
        parent, version = Path(save_dir) / str(_told(logger, "name") or ""), _told(logger, "version")
        own = None if version is None else parent / _version_folder(version)
        takes_own = own is not None and (not self._is_first or self._makes(own, option))
        self.path = own if takes_own else self._new(parent, option)

    def follow(self, trainer: Trainer) -> None:
        """Put the run's configuration and checkpoints into the folder, and watch whether the run begins.

        Args:
            trainer: The Trainer, before it runs anything.
        """
        self._trainer = trainer
        self._config.logger = self._as_written  # what is saved can be run again, into a new folder
        if self._asks_logger and trainer.loggers:
            self._ask(trainer.loggers[0])
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, SaveConfig):
                callback.folder = None if self._is_users_choice else self.path  # Lightning overwrites none
                callback.save_to_log_dir = callback.folder is None
            elif isinstance(callback, ModelCheckpoint) and callback.dirpath is None and self.path is not None:
                callback.dirpath = str(self.path.absolute() / "checkpoints")
        roots = [Path(root) for logger in trainer.loggers if (root := getattr(logger, "root_dir", None))]
        roots += [Path(folder) for logger in trainer.loggers if (folder := getattr(logger, "log_dir", None))]
        existed = {path for root in roots for path in (root, *root.parents, *_children(root)) if path.exists()}
        self._existed = existed - set(self._made)
        # Steps in processes that this one starts by fork or spawn aren't seen here: their logs stay.
        self.began |= isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)
        for name in _STEPS:
            wrap_method(trainer.strategy, name, self._note)
        # Modules that optimize by hand need not step through the strategy, nor need those with their `optimizer_step`.
        loop = trainer.fit_loop.epoch_loop
        wrap_method(loop.manual_optimization, "run", self._note)
        wrap_method(loop, "advance", self._note)

    def _note(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.began |= self._trainer is None or not self._trainer.sanity_checking
        return result

    def remove_if_unused(self) -> None:
        """Remove the run's folders, and those above them that are now empty, if no step was done."""
        if self.began or (self._trainer is not None and not self._trainer.is_global_zero):
            return
        if self._made:
            _end_wandb()
        if self._trainer is not None:
            self._remove_of_loggers(self._trainer)  # which lie in folders that this class has made
        if self._made:
            if self.path == self._made[-1] and self._is_ours(self._made[-1]):  # one above it is of other runs, too
                shutil.rmtree(self._made[-1], ignore_errors=True)
            for folder in reversed(self._made):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _remove_of_loggers(self, trainer: Trainer) -> None:
        """Remove what loggers made that this class has not placed."""
        for logger in trainer.loggers:
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

        A run that started at the same moment may have taken the same number of a folder that Lightning made; then the
        configuration is its own.
        """
        callbacks = self._trainer.callbacks if self._trainer is not None else []  # type: ignore[attr-defined]
        saved = any(c.already_saved for c in callbacks if isinstance(c, SaveConfigCallback))
        if (folder / "config.yaml").exists() and not saved and folder not in self._made:
            return False
        files = [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
        if not all(path.name.startswith(_OF_A_START) or path.parts[0] == "wandb" for path in files):
            return False
        return not any(_has_results(folder / path) for path in files if path.name == "metrics.csv")


def _has_results(file: Path) -> bool:
    """Whether a `metrics.csv` has figures of the user's, which a training step may log before it ends."""
    with file.open(newline="", errors="replace") as lines:
        return bool(set(next(csv.reader(lines), ())) - _FIGURES_OF_A_START)


def _default_root(path: Path) -> str:
    return f"`trainer.default_root_dir={str(path)!r}`"


def _unusable(option: str, folder: Path, error: OSError) -> ValueError:
    return ValueError(f"{option}: the folder {str(folder)!r} can't be made: {error.strerror}. Name another.")


def _goes_to_address(config: Namespace) -> bool:
    """Whether a run lies at an address (`s3://...`), where only Lightning's file systems can make folders.

    Raises:
        ValueError: If W&B, which writes to folders alone, is given one.
    """
    logger = config.get("logger")
    loggers = [spec for spec in (logger if isinstance(logger, list) else [logger]) if isinstance(spec, Namespace)]
    places = [(_kind(spec), str((spec.get("init_args") or {}).get("save_dir"))) for spec in loggers]
    wrong = next((place for kind, place in places if kind == "WandbLogger" and "://" in place), None)
    if wrong is not None:
        raise ValueError(f"`save_dir={wrong!r}` of WandbLogger is an address, and W&B writes to local folders only.")
    return any("://" in place for place in (str(config.get("default_root_dir")), *(place for _, place in places)))


def _is_first(config: Namespace) -> bool:
    """Whether this process makes the run's folder.

    Where Lightning's own launcher is started on several machines, the first process of each has no rank yet.
    """
    machine = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    is_other_machine = config.get("num_nodes", 1) > 1 and machine != "0"
    return getattr(rank_zero_only, "rank", 0) == 0 and not is_other_machine


def _is_lightnings(spec: Namespace) -> bool:
    package, dot, _ = str(spec.get("class_path")).partition(".")
    return not dot or package in _LIGHTNINGS


def _told(logger: Any, name: str) -> Any:
    """What a logger of the user's says of itself; None if it doesn't, or fails to."""
    with contextlib.suppress(Exception):
        return getattr(logger, name, None)
    return None


def _version_folder(version: Any) -> str:
    return version if isinstance(version, str) else f"version_{version}"


def _kind(spec: Namespace) -> str:
    return str(spec.get("class_path")).rpartition(".")[2]


def _end_wandb() -> None:
    """Let W&B close the files of a run that is about to be removed."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        with contextlib.suppress(Exception):  # whatever it says, the error that ended the run is what counts
            wandb.finish(exit_code=1, quiet=True)


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
