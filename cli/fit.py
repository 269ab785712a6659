"""`memfit fit|validate|test|predict`, and the planning that `memfit: auto` in a recipe asks for.

On one device `MemFit` replaces the techniques that a recipe names. With several devices, the run is planned as by
`memfit plan`, and the plan's settings replace the recipe's, its strategy included. Where something else has started the
processes (torchrun, SLURM) the strategy is settled: `MemFit` plans on the first rank and tells the others.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_memfit.hub import asked_once
from lightning_memfit.measure.guarded_loggers import guard_loggers
from lightning_memfit.memory.kind import allows_cuda
from lightning_memfit.planner.plan import check_adapters, is_batching, is_technique
from lightning_memfit.planner.workload import DEFAULT_ALLOW
from lightning_memfit.reliability.non_finite import NonFiniteGuard
from lightning_memfit.reliability.preemption import Preemption
from lightning_memfit.reliability.whole_steps import WholeSteps

from .arguments import next_line
from .errors import RunFailedError
from .lightning_cli import MemFitCLI
from .run_folder import RunFolder, SaveConfig

PLAN_VARIABLE = "MEMFIT_AUTO_PLAN"
"""Variable with the plan's file for the processes that a strategy starts, so that all of them use one plan."""

_STARTED_BY_OTHERS = (
    *("TORCHELASTIC_RUN_ID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "JSM_NAMESPACE_RANK"),
)
"""Variables that launchers set for each of their processes: torchrun, whoever starts them by hand, MPI and LSF."""

_STEP_OF = {"validate": "validation_step", "test": "test_step"}

_MEM_FIT = "lightning_memfit.fitting.auto.MemFit"


def main(argv: list[str]) -> int:
    """Run `fit`, `validate`, `test` or `predict`."""
    FitCLI(argv)
    return 0


class FitCLI(MemFitCLI):
    """The command line that trains; it plans first if the recipe says `memfit: auto`.

    A run that ends before its first step leaves no folder.

    Raises:
        RunFailedError: If an error ends a run after its first step.
    """

    def __init__(self, args: ArgsType = None, run: bool = True, **options: Any) -> None:
        self._folder: RunFolder | None = None
        try:
            with asked_once():
                super().__init__(args, run, **{"save_config_callback": SaveConfig, **options})
        except BaseException as error:
            if self._folder is None:
                raise
            ended = [c.error for c in self.trainer.callbacks if isinstance(c, Preemption) and c.error]
            if isinstance(error, SystemExit) and ended:
                error = SystemExit(ended[0].exit_code)
            if isinstance(error, KeyError) and "contains only the model" in str(error):
                error = ValueError(_weights_only(str(self.trainer.ckpt_path)))
            self._folder.remove_if_unused()
            if self._folder.began and isinstance(error, Exception):
                raise RunFailedError from error
            raise error

    @override
    def after_instantiate_classes(self) -> None:
        """Give the run its folder, guard its steps, let signals end it at one, and loggers end it never."""
        if self.subcommand in ("validate", "test", "predict") and self.config[self.subcommand].ckpt_path is None:
            print("memfit: no `--ckpt_path`: the weights are those that the model starts with.", file=sys.stderr)
        if self.subcommand is not None:
            self._folder = RunFolder(self.trainer)
        guard_loggers(self.trainer.loggers)
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if self.subcommand == "fit":
            named = {type(callback) for callback in callbacks}
            callbacks.extend(kind() for kind in (NonFiniteGuard, WholeSteps, Preemption) if kind not in named)

    @rank_zero_only
    @override
    def after_fit(self) -> None:
        """Say where the run and its checkpoint are, and what to do with them."""
        super().after_fit()
        path = None if self._folder is None else self._folder.path
        folder = path or getattr(self.trainer.logger, "log_dir", None)
        if folder:
            print(f"Run: {folder}")
        checkpoint = self.checkpoint()
        line = self._next(checkpoint, folder) if checkpoint else self._next_without_checkpoint()
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

    def _next_without_checkpoint(self) -> str | None:
        """Say how to make the run again so that it leaves a checkpoint."""
        words, trainer = self._given[1:], self.trainer
        if not words:
            return None
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return next_line("fit", [*words, "--trainer.fast_dev_run=false"], "the whole run")
        if not trainer.checkpoint_callbacks:
            return next_line("fit", [*words, "--trainer.enable_checkpointing=true"], "leaves a checkpoint")
        if not trainer.global_step:
            return None
        every = f"--trainer.callbacks.every_n_train_steps={trainer.global_step}"
        return next_line("fit", [*words, "--trainer.callbacks+=ModelCheckpoint", every], "leaves a checkpoint")

    @override
    def before_instantiate_classes(self) -> None:
        """Replace the recipe's techniques if it says `memfit: auto`: by `MemFit`, or before ranks start by a plan."""
        if getattr(self, "subcommand", None) != "fit" or self.config.fit.memfit != "auto":
            return
        trainer = self.config.fit.trainer
        if self._arguments is None or num_devices(trainer) == 1 or is_started_by_others(trainer.num_nodes):
            data = getattr(self.config.fit.get("data"), "init_args", None)
            plan_automatically(trainer, None if data is None else data.get("batch_size"))
            return
        plan = plan_file(self._arguments[1:])
        seed = self.config.fit.seed_everything  # a random seed is already drawn
        self.config = self.parse_plan(self.parser, [*self._arguments, "--config", str(plan), "--memfit=off"])
        self.config.fit.seed_everything = seed


def _weights_only(path: str) -> str:
    """What to do where a fit shall go on from a checkpoint that Lightning has found to lack states of optimizers."""
    return (
        f"`ckpt_path={path!r}` holds weights only (`save_weights_only`), and no states of optimizers: a fit can't go "
        "on from it. Give a checkpoint that was saved whole. `memfit validate`, `test` and `predict` take this one."
    )


def plan_automatically(trainer: Any, batch_size: int | None = None) -> None:
    """Change a trainer's configuration, and say which callbacks the plan replaces."""
    named = trainer.callbacks or []
    callbacks = named if isinstance(named, list) else [named]
    replaced = [spec.class_path for spec in callbacks if is_technique(spec.class_path)]
    kept = [spec for spec in callbacks if spec.class_path not in replaced]
    own = next((spec for spec in kept if spec.class_path.endswith(".MemFit")), None)
    allow = DEFAULT_ALLOW if own is None or not own.init_args.allow else own.init_args.allow
    check_adapters(replaced, allow, "`memfit: auto` with `allow` of the callback MemFit that has `lora`")
    for spec in callbacks:
        if is_batching(spec.class_path):
            _check_batching(spec.get("init_args") or Namespace(), trainer, batch_size)
    if own is None:
        kept = [
            Namespace(class_path=_MEM_FIT, init_args=Namespace(allow=None, host_memory=None, tolerance=0.05)),
            *kept,
        ]
    if replaced:
        names = ", ".join(path.rpartition(".")[2] for path in replaced)
        print(f"memfit: auto: the plan replaces {names}.", file=sys.stderr)
    trainer.callbacks = kept
    if plugins := getattr(trainer, "plugins", None):
        plugins = plugins if isinstance(plugins, list) else [plugins]
        trainer.plugins = [one for one in plugins if not is_technique(getattr(one, "class_path", ""))] or None


_OF_BATCHES = ("loss_weight", "split_batch", "num_samples", "allow_batch_statistics")
"""Arguments of `MicroBatching` that say what a loss is a mean over, what samples are, and what may differ."""


def _check_batching(arguments: Any, trainer: Any, batch_size: int | None) -> None:
    """Refuse to leave out a recipe's `MicroBatching` if the plan's own would train by other numbers."""
    lost, fix = next((name for name in _OF_BATCHES if arguments.get(name)), None), ""
    whole = arguments.get("global_batch_size")
    if whole is not None and (batch_size or 0) * trainer.accumulate_grad_batches * num_devices(trainer) != whole:
        lost, fix = "global_batch_size", "set the loader's batch size to what it asks for, and leave it out; or "
    if lost is not None:
        raise ValueError(
            f"`memfit: auto` would replace MicroBatching by one without its `{lost}={arguments.get(lost)}`, and train "
            f"by other numbers. Keep them: {fix}`memfit plan --config ...` keeps all of its arguments."
        )


def num_devices(trainer: Any) -> int:
    """Return the number of devices, over all machines, that a trainer's configuration asks for."""
    if allows_cuda(str(trainer.accelerator)) and str(trainer.devices) in ("auto", "-1"):
        import torch

        return max(1, torch.cuda.device_count()) * int(trainer.num_nodes)
    from .recipe_run import device_numbers

    return len(device_numbers(trainer.devices) or (0,)) * int(trainer.num_nodes)


def is_started_by_others(num_nodes: int) -> bool:
    """Whether a run's processes are not all started by the first of them, which could plan before that."""
    if os.environ.get(PLAN_VARIABLE):
        return False
    return num_nodes > 1 or SLURMEnvironment.detect() or any(name in os.environ for name in _STARTED_BY_OTHERS)


def plan_file(arguments: Sequence[str]) -> Path:
    """Return the plan's file for a `fit` on several devices, made by the process that started this one or here."""
    known = os.environ.get(PLAN_VARIABLE)
    return Path(known) if known else _made(list(arguments))


def _made(arguments: list[str]) -> Path:
    from .arguments import read_arguments
    from .plan import write_overlay
    from .plan_recipe import PlanRequest, plan_recipe

    of_fit_alone = argparse.ArgumentParser(allow_abbrev=False)
    of_fit_alone.add_argument("--ckpt-path")
    of_fit_alone.add_argument("--memfit")
    _, of_recipe = read_arguments(of_fit_alone, arguments)
    made = plan_recipe(PlanRequest(tuple(of_recipe)), compare=False)
    if made is None:
        raise ValueError("`memfit: auto`: without a trace there is no plan. Choose techniques yourself: `memfit: off`.")
    plan = made[0]
    if not plan["fits"]:
        raise ValueError(f"`memfit: auto`: {plan['summary']} {' '.join(plan['advice'][1:])}".rstrip())
    folder = tempfile.TemporaryDirectory(prefix="memfit-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "plan.yaml"
    write_overlay(path, plan)
    os.environ[PLAN_VARIABLE] = str(path)
    for line in (plan["summary"], plan["numbers"], *plan["notes"]):
        print(f"memfit: auto: {line}", file=sys.stderr)
    return path
