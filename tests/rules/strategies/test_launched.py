import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_memfit import MicroBatching
from lightning_memfit.strategies.launched import synchronize_batch_norms
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> TorchElasticEnvironment:
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # which Lightning leaves behind, and takes for a launcher's
    return TorchElasticEnvironment()


@pytest.mark.parametrize("strategy", ["memfit_ddp", "memfit_fsdp2", "memfit_zero_2"])
def test_every_strategy_looks(
    strategy: str, torchrun: TorchElasticEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch import Trainer

    import lightning_memfit.strategies  # noqa: F401  registers the names

    if "zero" in strategy:
        pytest.importorskip("deepspeed")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    options = {"accelerator": "cpu", "devices": 2, "plugins": [torchrun], "logger": False}
    with pytest.raises(ValueError, match=r"`devices=2` and `num_nodes=1` .*does not match the world size \(4\)"):
        Trainer(strategy=strategy, **options)
    Trainer(strategy=strategy, num_nodes=2, **options)


class Normed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)


class NormedLate(Normed):
    """Makes its network when the run has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential()

    def configure_model(self) -> None:
        # In this rank's process: on the CPU DDP refuses such norms before `MicroBatching` can.
        nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None
        if not self.net:
            self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def synchronized(strategy: str, *callbacks: Callback, kind: type[Normed] = Normed) -> str:
    """What a run on two ranks of the CPU says, and whether its weights are those that it had."""
    module = kind()
    before = copy.deepcopy(module.state_dict())
    trainer = quiet_trainer(*callbacks, strategy=strategy, devices=2, max_steps=1, sync_batchnorm=True)
    try:
        trainer.fit(module)
    except Exception as error:
        same = all(torch.equal(before.get(name, value), value) for name, value in module.state_dict().items())
        return f"{error} same: {same}"
    return "nothing"


@pytest.mark.parametrize("kind", [Normed, NormedLate])
def test_micro_batches_refuse_norms_that_wait_for_other_ranks(kind: type[Normed], tmp_path: Path) -> None:
    micro_batching = MicroBatching(micro_batch_size=1, allow_batch_statistics=True)
    run = partial(synchronized, "memfit_ddp", micro_batching, kind=kind)
    for ended in run_ranks(run, 2, tmp_path):
        assert "`MicroBatching`: `net.1` takes its statistics over all ranks" in ended.result, ended.output[-2000:]
        assert ended.result.endswith("same: True")


def test_batch_norms_are_synchronized_on_a_gpu() -> None:
    module = Normed()
    parameters = list(module.parameters())
    trainer = SimpleNamespace(
        _accelerator_connector=SimpleNamespace(_layer_sync=TorchSyncBatchNorm()),
        world_size=2,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        strategy=SimpleNamespace(root_device=torch.device("cuda", 0)),
    )
    synchronize_batch_norms(cast(Any, trainer), module)
    assert isinstance(module.net[1], nn.SyncBatchNorm)
    assert all(map(lambda one, other: one is other, parameters, module.parameters()))
    module = Normed()
    trainer.state.fn = TrainerFn.VALIDATING
    synchronize_batch_norms(cast(Any, trainer), module)
    assert type(module.net[1]) is nn.BatchNorm1d
