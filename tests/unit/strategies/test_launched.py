import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_memfit.strategies.launched import check_num_nodes


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> TorchElasticEnvironment:
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return TorchElasticEnvironment()


def test_num_nodes_left_at_one_under_two_torchruns(torchrun: TorchElasticEnvironment) -> None:
    with pytest.raises(MisconfigurationException, match="`trainer.devices=2` and `trainer.num_nodes=2`"):
        check_num_nodes(torchrun, 2, 1)


def test_what_was_started_is_accepted(torchrun: TorchElasticEnvironment) -> None:
    check_num_nodes(torchrun, 2, 2)
    check_num_nodes(LightningEnvironment(), 2, 1)
    check_num_nodes(None, 2, 1)


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
    with pytest.raises(MisconfigurationException, match="the launcher has started 4"):
        Trainer(strategy=strategy, accelerator="cpu", devices=2, plugins=[torchrun], logger=False)
