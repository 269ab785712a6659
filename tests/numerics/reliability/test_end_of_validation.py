"""Which schedulers on a plateau tell a preempted run that it may not end before a validation."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_memfit.reliability.upstream.lightning import a_plateau_waits_for_a_step, step_plateau_schedulers


def trainer_with(frequencies: dict[str, int], batch_idx: int, logged: set[str], is_automatic: bool = True) -> Any:
    configs = [
        SimpleNamespace(reduce_on_plateau=True, interval="step", monitor=monitor, frequency=frequency)
        for monitor, frequency in frequencies.items()
    ]
    stepped: list[str] = []
    loop = SimpleNamespace(
        batch_idx=batch_idx,
        _results=SimpleNamespace(metrics=lambda on_step: {"callback": dict.fromkeys(logged)}),
        update_lr_schedulers=lambda interval, update_plateau_schedulers: stepped.append(interval),
    )
    return SimpleNamespace(
        lr_scheduler_configs=configs,
        callback_metrics=dict.fromkeys(logged),
        lightning_module=SimpleNamespace(automatic_optimization=is_automatic),
        fit_loop=SimpleNamespace(epoch_loop=loop),
        stepped=stepped,
    )


@pytest.mark.parametrize(("batch_idx", "waits"), [(1, False), (2, True), (3, False), (5, True)])
def test_schedulers_that_are_not_due_are_not_waited_for(batch_idx: int, waits: bool) -> None:
    assert a_plateau_waits_for_a_step(trainer_with({"loss": 3}, batch_idx, {"loss"})) is waits


def test_schedulers_stepped_by_hand_are_not_waited_for() -> None:
    assert not a_plateau_waits_for_a_step(trainer_with({"loss": 1}, 0, {"loss"}, is_automatic=False))


def test_unknown_metrics_of_schedulers_that_are_not_due_hold_up_no_other() -> None:
    trainer = trainer_with({"loss": 1, "rare": 100}, 0, {"loss"})
    step_plateau_schedulers(trainer, "step")
    assert trainer.stepped == ["step"]
