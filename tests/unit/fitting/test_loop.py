"""Fails when the private parts of Lightning that `fitting.step.loop` extends have moved."""

import inspect

import lightning
import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.step.loop import LIGHTNING_VERSION, MicroBatchLoop
from tests.helpers.fitting import Tagger
from tests.helpers.trainers import fit, quiet_trainer


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_upstream_is_where_it_was() -> None:
    assert lightning.__version__.startswith(LIGHTNING_VERSION), "read `fitting/step/loop.py` against the new version"
    assert parameters(_AutomaticOptimization.run) == ["self", "optimizer", "batch_idx", "kwargs"]
    assert parameters(_AutomaticOptimization._make_closure) == ["self", "kwargs", "optimizer", "batch_idx"]
    assert parameters(_AutomaticOptimization._make_zero_grad_fn) == ["self", "batch_idx", "optimizer"]
    assert parameters(_AutomaticOptimization._optimizer_step) == [
        "self",
        "batch_idx",
        "train_step_and_backward_closure",
    ]
    assert parameters(_AutomaticOptimization.__init__) == ["self", "trainer"]
    assert parameters(Precision._after_closure) == ["self", "model", "optimizer"]
    assert parameters(_TrainingEpochLoop._update_learning_rates) == ["self", "interval", "update_plateau_schedulers"]
    assert parameters(pl.Trainer.save_checkpoint)[:2] == ["self", "filepath"]
    assert parameters(ClosureResult.from_training_step_output) == ["training_step_output", "normalize"]
    assert parameters(_ResultCollection.log)[:4] == ["self", "fx", "name", "value"]
    assert parameters(call._call_strategy_hook)[:2] == ["trainer", "hook_name"]
    source = inspect.getsource(_AutomaticOptimization._training_step)
    assert "from_training_step_output" in source
    assert "self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)" in inspect.getsource(
        _TrainingEpochLoop.advance
    )


def test_install_and_uninstall_leave_lightnings_loop() -> None:
    trainer = quiet_trainer()
    epoch_loop = trainer.fit_loop.epoch_loop
    original, progress = epoch_loop.automatic_optimization, epoch_loop.automatic_optimization.optim_progress
    loop = MicroBatchLoop(trainer)
    loop.install()
    assert epoch_loop.automatic_optimization is loop
    assert loop.optim_progress is progress
    loop.uninstall()
    loop.uninstall()
    assert epoch_loop.automatic_optimization is original
    assert original.optim_progress is progress


def test_everything_is_taken_off_after_a_run_and_after_an_error() -> None:
    class Broken(Tagger):
        def training_step(self, batch: object, batch_idx: int) -> None:
            raise KeyError("broken")

    for module in (Tagger(), Broken()):
        callback = MicroBatching(micro_batch_size=4)
        trainer = quiet_trainer(callback)
        strategy_before = set(vars(trainer.strategy))
        try:
            trainer.fit(module)
        except KeyError:
            assert isinstance(module, Broken)
        assert type(trainer.fit_loop.epoch_loop.automatic_optimization) is _AutomaticOptimization
        assert not {"validation_step", "test_step", "predict_step"} & (set(vars(trainer.strategy)) - strategy_before)
        assert "log" not in vars(trainer.fit_loop.epoch_loop._results)
        assert all("step" not in vars(optimizer) for optimizer in trainer.optimizers)


def test_hooks_fire_as_often_as_without_micro_batches() -> None:
    names = ("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step")

    class Counting(pl.Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

    def counter(name: str) -> object:
        return lambda self, *_: self.calls.append(name)

    for name in names:
        setattr(Counting, name, counter(name))
    plain, ours = Counting(), Counting()
    fit(Tagger(batch_size=8), plain, accumulate_grad_batches=2)
    fit(Tagger(batch_size=8), ours, MicroBatching(micro_batch_size=3), accumulate_grad_batches=2)
    assert ours.calls == plain.calls
