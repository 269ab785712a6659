"""Runs go on from checkpoints of FSDP2 with all that was saved, under torch.compile's names, too."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memfit.strategies import FullyShardedStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer


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


def train(case: tuple[str, bool], steps: int, save: Path | None = None, resume: Path | None = None) -> Any:
    module = Net(*case)
    strategy = FullyShardedStrategy(process_group_backend="gloo")
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=steps, max_epochs=-1)
    trainer.fit(module, ckpt_path=resume)
    weights = {name: parameter.full_tensor().detach().clone() for name, parameter in module.named_parameters()}
    if save is not None:
        trainer.save_checkpoint(save)
    return weights, trainer.optimizers[0].param_groups[0]["rounds"]


CASES = [(optimizer, compiled) for optimizer in OPTIMIZERS for compiled in (False, True)]


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


class Counting(nn.Module):
    """Counts its calls in a buffer without dimensions, in a batch norm's, and in what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.calls = nn.BatchNorm1d(8), nn.Linear(8, 4), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        return self.layer(self.norm(x))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Counts(Net):
    def __init__(self, compiled: bool) -> None:
        super().__init__("AdamW", False)
        net = Counting()
        self.net = torch.compile(net, backend="eager") if compiled else net
        self.found: Any = None

    def on_train_start(self) -> None:
        net = getattr(self.net, "_orig_mod", self.net)
        weights = [getattr(one, "full_tensor", one.clone)().detach().clone() for one in net.parameters()]
        self.found = (net.calls, float(net.count), int(net.norm.num_batches_tracked), weights)


FROM_TO = [(True, True), (True, False), (False, True)]
"""Whether the network is compiled in the run that saves, and in the one that goes on."""


def counted(compiled: bool, steps: int, save: Path | None = None, resume: Path | None = None) -> Any:
    torch._dynamo.reset()
    module = Counts(compiled)
    strategy = FullyShardedStrategy(process_group_backend="gloo")
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=steps, max_epochs=-1)
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.found, [getattr(one, "full_tensor", one.clone)().detach().clone() for one in module.net.parameters()]


def gone_on_elsewhere(folder: Path) -> dict[Any, Any]:
    """Whether a run went on with all that another one's module had, and what it had counted; or an error in words."""
    found: dict[Any, Any] = {}
    for number, (before, after) in enumerate(FROM_TO):
        try:
            _, weights = counted(before, 3, save=folder / f"elsewhere-{number}.ckpt")
            (*counts, resumed), _ = counted(after, 4, resume=folder / f"elsewhere-{number}.ckpt")
            same = all(map(torch.equal, weights, resumed))
            found[before, after] = (same, *counts)
        except Exception as error:
            found[before, after] = f"{type(error).__name__}: {error}"
    return found


class LateGroup(Net):
    """Gives the optimizer its biases in the second epoch, as `BackboneFinetuning` does."""

    def __init__(self) -> None:
        super().__init__("AdamW", False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for name, one in self.named_parameters() if name.endswith("weight")])

    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            biases = [one for name, one in self.named_parameters() if name.endswith("bias")]
            self.optimizers().add_param_group({"params": biases})  # type: ignore[union-attr]


def gone_on_without(folder: Path) -> str:
    """What resuming says where the run's optimizer has fewer weights than the saved one."""
    first = quiet_trainer(strategy=FullyShardedStrategy(process_group_backend="gloo"), devices=1, max_epochs=2)
    first.fit(LateGroup())
    first.save_checkpoint(folder / "late.ckpt")
    again = quiet_trainer(strategy=FullyShardedStrategy(process_group_backend="gloo"), devices=1, max_epochs=3)
    module = LateGroup()
    weights = [one.detach().clone() for one in module.parameters()]
    try:
        again.fit(module, ckpt_path=folder / "late.ckpt")
    except ValueError as error:
        now = [one.full_tensor() for one in module.parameters()]  # type: ignore[operator]
        return f"{error} same weights: {all(map(torch.equal, weights, now))}"
    return "nothing"


def all_results(folder: Path) -> Any:
    return gone_on(folder), gone_on_elsewhere(folder), gone_on_without(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("states")
    (ended,) = run_ranks(all_results, 1, folder, folder)
    assert ended.code == 0, ended.output[-3000:]
    return ended.result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_an_optimizer_keeps_is_resumed(results: Any, case: tuple[str, bool]) -> None:
    assert results[0][case] == (0.0, 6, 6)


@pytest.mark.parametrize("case", FROM_TO, ids=str)
def test_names_of_compiled_networks_match_those_of_others(results: Any, case: Any) -> None:
    assert results[1][case] == (True, 3, 3.0, 3)


def test_weights_that_the_saved_run_trained_are_not_left_out(results: Any) -> None:
    assert "states for 'net.0.bias', 'net.2.bias', which this run's optimizer has not" in results[2]
    assert "same weights: True" in results[2]
