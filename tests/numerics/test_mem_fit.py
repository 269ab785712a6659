"""`MemFit` under a simulated limit: plan, train, and leave nothing behind."""

import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.auto import MemFit
from lightning_memfit.fitting.size.prediction import MemoryPrediction
from lightning_memfit.strategies import FullyShardedStrategy
from lightning_memfit.techniques.gradient_release import GradientRelease
from tests.helpers.trainers import quiet_trainer
from tests.zoo.split_steps import Record

WIDTH, LAYERS, SAMPLES = 128, 8, 64
LIMIT = 6 << 20


class Perceptron(pl.LightningModule):
    """Knows nothing of any technique. 0.5 MB of weights, 2 MB with gradients and states; 64 x 8 KiB of activations."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)]
        self.blocks = torch.nn.Sequential(*blocks)
        self.head = torch.nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.head(self.blocks(x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Normalised(Perceptron):
    """Its layers take statistics over their micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.insert(1, torch.nn.BatchNorm1d(WIDTH))  # type: ignore[operator]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


def loader(batch: int = 4096) -> DataLoader[Any]:
    x = torch.randn(2 * batch, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(list(zip(x, x.mean(1, keepdim=True), strict=True)), batch_size=batch)


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return quiet_trainer(*callbacks, **{"max_steps": 2, **options})


class TrainedOtherwise(pl.LightningModule):
    """Trains with another optimizer; its weights are most of its memory, so that releasing gradients pays."""

    def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(6)]
        self.blocks = torch.nn.Sequential(*blocks)
        self.optimizer = optimizer
        self.stepped: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.blocks(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-3)  # type: ignore[call-arg]

    def on_train_start(self) -> None:
        self.stepped += [type(getattr(one, "optimizer", one)).__name__ for one in self.trainer.optimizers]


@pytest.mark.nightly
@pytest.mark.nightly_cases("Adagrad", "RMSprop")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_optimizer_stays_the_modules_own_unless_allowed(optimizer: type[torch.optim.Optimizer]) -> None:
    automatic, module = MemFit(allow=["exact"]), TrainedOtherwise(optimizer)
    trainer(automatic, MemoryLimit(6 << 20)).fit(module, DataLoader(torch.randn(512, 256), batch_size=64))  # type: ignore[arg-type]
    assert module.stepped == [optimizer.__name__]


class AccumulatesByHand(pl.LightningModule):
    """Lightning's documented way, which never steps where an epoch has fewer batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.net(batch).pow(2).mean() / 4)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("batches", [2, 8])
def test_accumulation_by_hand_is_predicted_or_refused_at_once(batches: int) -> None:
    data = DataLoader(torch.randn(4 * batches, 8), batch_size=4)  # type: ignore[arg-type]
    started = time.monotonic()
    for refusing in (MicroBatching(), MemFit(allow=["exact"])):
        with pytest.raises(MisconfigurationException, match="with manual optimization"):
            quiet_trainer(refusing, MemoryLimit(1 << 30), max_epochs=2).fit(AccumulatesByHand(), data)
    predicted = quiet_trainer(MemoryPrediction(), max_epochs=2)
    predicted.fit(AccumulatesByHand(), data)
    assert predicted.global_step == 2 * (batches // 4)
    assert time.monotonic() - started < 60


def test_a_run_that_would_not_fit_trains_and_leaves_the_trainer_as_it_was() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trainer(MemoryLimit(LIMIT)).fit(Perceptron(), loader())
    automatic, limit, module = MemFit(allow=["exact"]), MemoryLimit(LIMIT), Perceptron()
    ours = trainer(automatic, limit)
    before = list(ours.callbacks)
    weights = module.head.weight.clone()
    ours.fit(module, loader())
    assert ours.global_step == 2
    assert automatic.plan is not None
    assert automatic.plan.needed_bytes <= LIMIT
    assert limit.ledger is not None
    assert limit.ledger.peak_bytes <= LIMIT
    assert ours.callbacks == before
    assert not torch.equal(weights, module.head.weight)


def test_exact_techniques_give_the_plain_runs_weights() -> None:
    plain, planned = Perceptron(), Perceptron()
    planned.load_state_dict(plain.state_dict())
    trainer().fit(plain, loader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Memory ran out")
        trainer(MemFit(allow=["exact"]), MemoryLimit(LIMIT)).fit(planned, loader())
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_precision_is_the_plans_during_the_run_and_the_users_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Notes(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.precision = trainer.precision

    notes, automatic = Notes(), MemFit()
    ours = trainer(automatic, MemoryLimit(LIMIT), notes)
    messages: list[str] = []
    monkeypatch.setattr("lightning_memfit.fitting.auto.rank_zero_info", messages.append)
    ours.fit(Perceptron(), loader())
    assert automatic.plan is not None
    assert automatic.plan.setting is not None
    said = next(message for message in messages if "changes in the numbers" in message)
    assert said.startswith(f"MemFit: precision {notes.precision}, optimizer ")
    assert notes.precision == automatic.plan.setting.precision
    assert ours.precision == "32-true"


@pytest.mark.nightly_cases("callback0")
@pytest.mark.parametrize(
    ("callback", "message"), [(MemoryLimit("600KiB"), "Nothing fits"), (GradientRelease(), "GradientRelease already")]
)
def test_what_it_cannot_do_is_one_clear_message(callback: pl.Callback, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        trainer(MemFit(allow=["exact"]), callback).fit(Perceptron(), loader())


def test_strategies_that_divide_in_unknown_ways_are_refused() -> None:
    half = FullyShardedStrategy(sharding_size=1)
    for strategy in (half, ModelParallelStrategy(), FullyShardedStrategy(tensor_parallel_size=2)):
        several = trainer(MemFit(), strategy=strategy, devices=2)
        with pytest.raises(MisconfigurationException, match="can't plan under .*shards over all ranks"):
            MemFit()._check(several)


def test_contradictory_arguments() -> None:
    with pytest.raises(ValueError, match="allow"):
        MemFit(allow=[])
    with pytest.raises(ValueError, match="fp7"):
        MemFit(allow=["fp7"])


@pytest.mark.nightly
def test_batches_of_layers_that_take_statistics_over_them_stay_whole() -> None:
    """Micro-batches would be refused; recomputing blocks fits, too."""
    torch.manual_seed(0)
    plain, fitted = Normalised(), Normalised()
    fitted.load_state_dict(plain.state_dict())
    trainer().fit(plain, loader())
    mem_fit = MemFit(allow=["exact"])
    trainer(mem_fit, MemoryLimit("30MiB")).fit(fitted, loader())
    assert mem_fit.plan is not None
    assert mem_fit.plan.setting is not None
    assert mem_fit.plan.setting.micro_batch_size == 4096
    assert mem_fit.plan.setting.has("activation_checkpointing")
    found, wanted = fitted.state_dict(), plain.state_dict()
    statistics = [name for name in wanted if "running" in name]
    assert len(statistics) == 2 * LAYERS
    for name in statistics:
        torch.testing.assert_close(found[name], wanted[name])
    with pytest.raises(MisconfigurationException, match=r"Smaller micro-batches are not planned: .*\(blocks.0.1, "):
        trainer(MemFit(allow=["exact"]), MemoryLimit("20MiB")).fit(Normalised(), loader())


# --- what can't be planned, or only looked as if ----------------------------------------------------------------------


class Packed(pl.LightningModule):
    """A packed recurrent network: it reads lengths off the series, of whose values a trace knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.LSTM(4, 32, batch_first=True)
        self.sizes = Record()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        lengths = batch[0].abs().sum(-1).gt(0).sum(1).cpu()
        packed = torch.nn.utils.rnn.pack_padded_sequence(batch[0], lengths, batch_first=True, enforce_sorted=False)
        return self.net(packed)[1][0].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        lengths = torch.arange(32) % 6 + 1
        series = torch.randn(32, 6, 4) * (torch.arange(6) < lengths[:, None])[..., None]
        return DataLoader(torch.utils.data.TensorDataset(series, lengths), batch_size=16)


class Graphs(pl.LightningModule):
    """Nodes of all graphs in one tensor, which the module cuts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
        self.sizes = Record()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch["y"]))
        sums = torch.zeros(len(batch["y"])).index_add(0, batch["graph"], self.net(batch["x"]).squeeze(-1))
        return torch.nn.functional.mse_loss(sums, batch["y"])

    def num_samples(self, batch: Any) -> int:
        return len(batch["y"])

    def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
        parts, begin = [], 0
        for size in sizes:
            mine = (batch["graph"] >= begin) & (batch["graph"] < begin + size)
            graph = batch["graph"][mine] - begin
            parts.append({"x": batch["x"][mine], "graph": graph, "y": batch["y"][begin : begin + size]})
            begin += size
        return parts

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        def collate(numbers: list[int]) -> dict[str, torch.Tensor]:
            nodes = torch.tensor([3 + number % 3 for number in numbers])
            graph = torch.repeat_interleave(torch.arange(len(nodes)), nodes)
            return {"x": torch.randn(len(graph), 4), "graph": graph, "y": torch.randn(len(nodes))}

        return DataLoader(range(64), batch_size=16, collate_fn=collate)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "reason"), [(Packed, "depends on values of tensors"), (Graphs, "split_batch")])
def test_what_cannot_be_planned_is_measured(kind: Any, reason: str, recwarn: pytest.WarningsRecorder) -> None:
    peaks = []
    for size in (4, 16):
        limit = MemoryLimit("1GiB")
        trainer(limit, MicroBatching(micro_batch_size=size)).fit(kind())
        assert limit.ledger is not None
        peaks.append(limit.ledger.peak_bytes)
    module, mem_fit = kind(), MemFit()
    run = trainer(mem_fit, MemoryLimit(sum(peaks) // 2), max_steps=3)
    run.fit(module)
    assert run.global_step == 3
    assert mem_fit.plan is None
    assert max([*module.sizes][-2:]) < 16
    told = [str(one.message) for one in recwarn if "can't be planned" in str(one.message)]
    assert len(told) == 1
    assert reason in told[0]
    assert not any(isinstance(one, MicroBatching) for one in run.callbacks)  # type: ignore[attr-defined]
