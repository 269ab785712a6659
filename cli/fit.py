"""`memfit fit|validate|test|predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import ArgsType
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_memfit.hub import asked_once
from lightning_memfit.measure.guarded_loggers import guard_loggers
from lightning_memfit.reliability.non_finite import NonFiniteGuard
from lightning_memfit.reliability.preemption import Preemption
from lightning_memfit.reliability.whole_steps import WholeSteps

from .arguments import next_line
from .errors import RunFailedError
from .lightning_cli import MemFitCLI
from .run_folder import SaveConfig, has_begun, make_run_folder

_STEP_OF = {"validate": "validation_step", "test": "test_step"}


def main(argv: list[str]) -> int:
    """Run `fit`, `validate`, `test` or `predict`."""
    FitCLI(argv)
    return 0


class FitCLI(MemFitCLI):
    """The command line that trains.

    Raises:
        RunFailedError: If an error ends a run after its first step.
    """

    def __init__(self, args: ArgsType = None, run: bool = True, **options: Any) -> None:
        self._folder: Path | None = None
        self._runs = False
        try:
            with asked_once():
                super().__init__(args, run, **{"save_config_callback": SaveConfig, **options})
        except BaseException as error:
            if not self._runs:
                raise
            callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
            ended = [c.error for c in callbacks if isinstance(c, Preemption) and c.error]
            if isinstance(error, SystemExit) and ended:
                error = SystemExit(ended[0].exit_code)
            if has_begun(self.trainer) and isinstance(error, Exception):
                raise RunFailedError from error
            raise error

    @override
    def after_instantiate_classes(self) -> None:
        """Give the run its folder, guard its steps, let signals end it at one, and loggers end it never."""
        if self.subcommand in ("validate", "test", "predict") and self.config[self.subcommand].ckpt_path is None:
            print("memfit: no `--ckpt_path`: the weights are those that the model starts with.", file=sys.stderr)
        if self.subcommand is not None:
            self._folder, self._runs = make_run_folder(self.trainer), True
        guard_loggers(self.trainer.loggers)
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if self.subcommand == "fit":
            named = {type(callback) for callback in callbacks}
            callbacks.extend(kind() for kind in (NonFiniteGuard, WholeSteps, Preemption) if kind not in named)

    @rank_zero_only
    def after_fit(self) -> None:
        """Say where the run and its checkpoint are, and what to do with them."""
        # Of several callbacks that write some, the first counts that has: its best one, else its last.
        names = ("best_model_path", "last_model_path")
        paths = [getattr(one, name, "") for one in self.trainer.checkpoint_callbacks for name in names]
        checkpoint = next(filter(None, paths), "")
        print(f"Checkpoint: {checkpoint}" if checkpoint else "No checkpoint was written.")
        folder = self._folder or getattr(self.trainer.logger, "log_dir", None)
        if folder:
            print(f"Run: {folder}")
        line = self._next(checkpoint, folder) if checkpoint else None
        if line is not None:
            print(line)

    def _next(self, checkpoint: str, folder: Path | str | None) -> str | None:
        """Say how to use a trained model: one that writes text in other programs, any other by its own steps."""
        if getattr(getattr(self.trainer, "datamodule", None), "hparams", {}).get("tokenizer"):
            from lightning_memfit.models import CausalLM, Seq2SeqLM

            if isinstance(self.model, (CausalLM, Seq2SeqLM)):
                return next_line("export", ["--ckpt_path", checkpoint, "--folder", "exported"])
        config = Path(folder or ".") / "config.yaml"
        steps = [name for name in ("validate", "test") if is_overridden(_STEP_OF[name], self.model)]
        if not steps or not config.is_file():
            return None
        return next_line(steps[0], ["--config", str(config), "--ckpt_path", checkpoint])
