"""Fails when the private parts of Lightning that `fitting.step.loop` extends have moved."""

import inspect

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_memfit.fitting import MicroBatching
from tests.helpers.fitting import Tagger, is_checking
from tests.helpers.trainers import difference, fit, quiet_trainer


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_upstream_is_where_it_was() -> None:
    assert lightning.__version__.startswith("2.6"), "read `fitting/step/loop.py` against the new version"
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
    saving = inspect.getsource(pl.Trainer.save_checkpoint)
    assert "self._checkpoint_connector.dump_checkpoint(weights_only)" in saving
    assert "self.strategy.save_checkpoint(checkpoint, filepath, storage_options=storage_options)" in saving
    assert parameters(Strategy.save_checkpoint)[:3] == ["self", "checkpoint", "filepath"]
    assert parameters(ClosureResult.from_training_step_output) == ["training_step_output", "normalize"]
    assert parameters(_ResultCollection.log)[:4] == ["self", "fx", "name", "value"]
    assert parameters(call._call_strategy_hook)[:2] == ["trainer", "hook_name"]
    source = inspect.getsource(_AutomaticOptimization._training_step)
    assert "from_training_step_output" in source
    assert "self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)" in inspect.getsource(
        _TrainingEpochLoop.advance
    )


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


class ZeroGradCounter(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_before_zero_grad(self, optimizer: object) -> None:
        self.calls += 1


@pytest.mark.parametrize("kind", [Tagger, ZeroGradCounter])
@pytest.mark.parametrize("profiler", [None, "simple"])
def test_counters_and_hooks_of_zero_grad_are_lightnings(kind: type[Tagger], profiler: str | None) -> None:
    modules = [kind(), kind()]
    plain = fit(modules[0], profiler=profiler, max_steps=3)
    ours = fit(modules[1], MicroBatching(micro_batch_size=8), profiler=profiler, max_steps=3)
    counts, wanted = (trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress for trainer in (ours, plain))
    assert counts.state_dict() == wanted.state_dict()
    assert counts.optimizer.zero_grad.total.started == 3
    assert [getattr(module, "calls", 0) for module in modules] == ([3, 3] if kind is ZeroGradCounter else [0, 0])
    if profiler:
        names, wanted_names = (
            {
                name
                for name in trainer.profiler.recorded_durations
                if name.endswith(f"{kind.__name__}.on_before_zero_grad")
            }
            for trainer in (ours, plain)
        )
        assert names == wanted_names != set()


def test_what_the_zero_grad_hook_writes_survives_a_repeated_batch() -> None:
    failed: list[int] = []  # calls in the third step; not on the module, where they would be rolled back

    class Failing(ZeroGradCounter):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if is_checking():
                return loss
            if self.trainer.global_step == 2:
                failed.append(batch_idx)
            if len(failed) == 2:  # gradients are cleared by then; the hook's work shows in the next batch's forward
                assert self.calls == 2
                failed.append(batch_idx)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

    for accumulated in (1, 2):
        failed.clear()
        quiet, ours = ZeroGradCounter(), Failing()
        fit(quiet, MicroBatching(micro_batch_size=8), max_steps=4, accumulate_grad_batches=accumulated)
        with pytest.warns(UserWarning, match="Memory ran out"):
            fit(ours, MicroBatching(micro_batch_size=8), max_steps=4, accumulate_grad_batches=accumulated)
        assert ours.calls == quiet.calls == 4
        assert difference(ours, quiet) < 1e-6
