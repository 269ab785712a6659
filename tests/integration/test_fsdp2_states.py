"""Optimizers go on from checkpoints of FSDP2 with what they keep, under torch.compile's names, too."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memfit.strategies import FullyShardedStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

pytestmark = pytest.mark.slow


class Fading(torch.optim.Optimizer):
    """Divides its rate by the number of the step, which is all that it keeps, as a tensor without dimensions."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["number"] = state.get("number", torch.zeros(())) + 1
                parameter.sub_(parameter.grad * (group["lr"] / float(state["number"])))
        return loss


OPTIMIZERS = {"SGD": lambda groups: torch.optim.SGD(groups, lr=0.1), "Fading": Fading, "AdamW": torch.optim.AdamW}


class Net(pl.LightningModule):
    def __init__(self, optimizer: str, compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.net = torch.compile(net, backend="eager") if compiled else net
        self.optimizer = optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        optimizer = OPTIMIZERS[self.optimizer]([{"params": biases}, {"params": weights, "lr": 0.03}])
        optimizer.param_groups[0].setdefault("rounds", 0)
        return optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().param_groups[0]["rounds"] += 1  # type: ignore[union-attr]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.linspace(0, 1, 8).repeat(8, 1), batch_size=2)


def train(case: tuple[str, bool, bool], steps: int, save: Path | None = None, resume: Path | None = None) -> Any:
    optimizer, compiled, one_file = case
    module = Net(optimizer, compiled)
    strategy = FullyShardedStrategy(process_group_backend="gloo", save_distributed_checkpoint=not one_file)
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=steps, max_epochs=-1)
    trainer.fit(module, ckpt_path=resume)
    weights = {name: parameter.full_tensor().detach().clone() for name, parameter in module.named_parameters()}
    if save is not None:
        trainer.save_checkpoint(save)
    return weights, trainer.optimizers[0].param_groups[0]["rounds"]


CASES = [
    (optimizer, compiled, one_file)
    for optimizer in OPTIMIZERS
    for compiled in (False, True)
    for one_file in (False, True)
]


def gone_on(folder: Path) -> dict[Any, Any]:
    """The largest difference between a run that went on and one that was never stopped; or an error in words."""
    found: dict[Any, Any] = {}
    for number, case in enumerate(CASES):
        try:
            whole, rounds = train(case, 6)
            train(case, 4, save=folder / f"{number}.ckpt")
            weights, resumed = train(case, 6, resume=folder / f"{number}.ckpt")
            differences = [float((weights[name] - whole[name]).abs().max()) for name in whole]
            found[case] = (max(differences), rounds, resumed)
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("states")
    (ended,) = run_ranks(gone_on, 1, folder, folder)
    assert ended.code == 0, ended.output[-3000:]
    return ended.result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_an_optimizer_keeps_is_resumed(results: dict[Any, Any], case: tuple[str, bool, bool]) -> None:
    assert results[case] == (0.0, 6, 6)
