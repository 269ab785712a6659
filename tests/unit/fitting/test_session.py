"""A global batch is shared by the devices that see samples of their own."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit.fitting.step.session import check_global_batch, local_batch_size_for


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
