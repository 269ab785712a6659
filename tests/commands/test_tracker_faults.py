"""Loggers that raise are said once; training goes on, and the CSV keeps its figures."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger
from torch.utils.data import DataLoader

from lightning_memfit.measure.guarded_loggers import guard_loggers
from tests.helpers.trainers import quiet_trainer


class Logs(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Raises(Logger):
    """Fails in everything that a run asks of it."""

    name, version = "raises", 0

    def log_metrics(self, metrics, step=None):
        raise ConnectionError("no route to the tracker")

    def log_hyperparams(self, params, *args, **kwargs):
        raise ConnectionError("no route to the tracker")

    def finalize(self, status):
        raise ConnectionError("no route to the tracker")


def train(*callbacks, loggers):
    trainer = quiet_trainer(*callbacks, logger=loggers, max_epochs=1, log_every_n_steps=1)
    guard_loggers(trainer.loggers)
    trainer.fit(Logs(), DataLoader(torch.randn(8, 4)))
    return trainer


def test_a_logger_that_raises_is_said_once(tmp_path):
    csv = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    with pytest.warns(UserWarning, match=r"Raises failed \(ConnectionError: no route to the tracker\)") as told:
        assert train(loggers=[csv, Raises()]).global_step == 8
    assert len([one for one in told if "no route" in str(one.message)]) == 1
    (file,) = tmp_path.rglob("metrics.csv")
    assert len(file.read_text().splitlines()) == 9


def test_guards_are_taken_off(tmp_path):
    logger = Raises()
    remove = guard_loggers([logger])
    logger.log_metrics({})
    remove()
    with pytest.raises(ConnectionError):
        logger.log_metrics({})
