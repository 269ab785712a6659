from torch import nn

from lightning_memfit.fitting.step.loss_checks import batch_statistics


def test_frozen_batch_norm_is_no_matter() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert batch_statistics(net) == ["0"]
    net[0].eval()
    assert batch_statistics(net) == []
