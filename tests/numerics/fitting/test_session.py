"""A global batch is shared by the devices that see samples of their own."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.step.session import check_global_batch, local_batch_size_for
from tests.helpers.fitting import Tagger
from tests.helpers.trainers import difference, fit


def trainer(**strategy):
    return SimpleNamespace(world_size=8, accumulate_grad_batches=2, strategy=SimpleNamespace(**strategy))


@pytest.mark.parametrize(
    ("strategy", "share"), [({}, 3), ({"tensor_parallel_size": 1}, 3), ({"tensor_parallel_size": 4}, 12)]
)
def test_devices_that_compute_together_count_once(strategy, share):
    assert local_batch_size_for(trainer(**strategy), 48) == share
    check_global_batch(trainer(**strategy), 48, share)


def test_what_does_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match="can't be divided by 8 devices x `accumulate_grad_batches=2`"):
        local_batch_size_for(trainer(), 40)
    with pytest.raises(MisconfigurationException, match="delivers 4 x 2 devices x `accumulate_grad_batches=2` = 16"):
        check_global_batch(trainer(tensor_parallel_size=4), 48, 4)


def test_a_plain_attribute_named_like_a_hook_is_not_one() -> None:
    plain, module = Tagger(), Tagger()
    module.num_samples, module.loss_weight, module.split_batch = 48, 0.5, torch.nn.Linear(1, 1)
    for one in (plain, module):
        fit(one, MicroBatching(micro_batch_size=4), max_steps=2, max_epochs=-1)
    assert difference([*plain.net.parameters()], [*module.net.parameters()]) == 0.0


@pytest.mark.parametrize("name", ["function", "method", "static"])
def test_methods_and_assigned_functions_are_hooks(name: str) -> None:
    calls = []

    class Hooked(Tagger):
        @staticmethod
        def static(batch: dict[str, torch.Tensor]) -> float:
            calls.append(1)
            return float((batch["labels"] != -100).sum())

        def method(self, batch: dict[str, torch.Tensor]) -> float:
            return self.static(batch)

    module = Hooked()
    if name == "function":
        module.loss_weight = Hooked.static
    else:
        Hooked.loss_weight = vars(Hooked)[name]
    fit(module, MicroBatching(micro_batch_size=4), max_steps=1, max_epochs=-1)
    assert calls


def test_a_global_batch_that_a_callback_multiplies_is_refused():
    callbacks = [GradientAccumulationScheduler({0: 2}), MicroBatching(global_batch_size=16)]
    with pytest.raises(MisconfigurationException, match=r"`global_batch_size=16` is one number, .*\{0: 2\}"):
        fit(Tagger(), *callbacks, max_steps=1, max_epochs=-1)
    fit(Tagger(), GradientAccumulationScheduler({3: 1}), callbacks[1], max_steps=1, max_epochs=-1)
