"""Training with `MicroBatching` equals training without it, or ends with the reason before a weight has changed."""

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.recovery.step_state import alike, places_of, reading_of
from lightning_memfit.fitting.step.check import SelfCheck
from lightning_memfit.fitting.step.loop import Fitting
from lightning_memfit.fitting.step.loss_weights import LossWeights
from lightning_memfit.reliability.non_finite import NonFiniteGuard
from tests.helpers.fitting import TwiceSGD, is_checking, out_of_memory
from tests.helpers.trainers import difference, fit
from tests.zoo.split_steps import (
    BATCH,
    Cleared,
    Clipped,
    Contrastive,
    Counting,
    Dropping,
    FirstMasked,
    FunctionalNorm,
    HalvesSums,
    HiddenWeights,
    InPlace,
    Made,
    Noisy,
    Normalised,
    Popping,
    QueueRead,
    Record,
    RelativeLoss,
    RunningVariance,
    Shrinks,
    ShrinksWhenCleared,
    Spectral,
    SumLoss,
    Teacher,
    Tokens,
    Toy,
    WrongHook,
    loader,
    regression,
    tokens,
)


class Recording(Toy):
    """Notes the calls of its step, and runs out of memory in some of them."""

    fails_at: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not is_checking():
            self.record.append(batch_idx)
            if len(self.record) in self.fails_at:
                raise out_of_memory()
        return super().training_step(batch, batch_idx)


def recording(kind: type[Toy]) -> Any:
    """A module of a class that notes its calls as well."""
    return kind() if issubclass(kind, Recording) else type(kind.__name__, (Recording, kind), {})()


def both(kind: type[Toy], size: int = 2, fails_at: tuple[int, ...] = (), **options: Any) -> tuple[Toy, Toy]:
    """Train a module without and with `MicroBatching`."""
    plain, ours = kind(), recording(kind)
    fit(plain, max_epochs=2)
    ours.fails_at = fails_at
    fit(ours, MicroBatching(micro_batch_size=size, **options), max_epochs=2)
    return plain, ours


def assert_exact(kind: type[Toy], size: int = 2, fails_at: tuple[int, ...] = (), **options: Any) -> tuple[Toy, Toy]:
    plain, ours = both(kind, size, fails_at, **options)
    assert difference(plain, ours) < 1e-9
    for (name, one), (_, other) in zip(plain.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=name)
    return plain, ours


def assert_refused(kind: type[Toy], match: str, size: int = 2, fails_at: tuple[int, ...] = ()) -> None:
    module = recording(kind)
    module.fails_at = fails_at
    with pytest.raises(MisconfigurationException, match=match):
        fit(module, MicroBatching(micro_batch_size=size), max_epochs=2)
    assert difference(module, kind()) == 0.0


# --- 1: checks also run when the size becomes smaller later -----------------------------------------------------------


REFUSED: list[tuple[type[Toy], str]] = [
    (Contrastive, "Samples affect each other"),
    (Normalised, r"1 BatchNorm layers \(norm\)"),
    (HiddenWeights, r"they count .* define `loss_weight\(batch\)`"),
    (WrongHook, "as `loss_weight` says, but"),
    (QueueRead, "changes `queue` of the module"),
    (RunningVariance, "changes `variance` of the module"),
    (RelativeLoss, "from the second step on: the first one changes `first`"),
    (HalvesSums, "would give other weights"),
]


@pytest.mark.parametrize(("size", "fails_at"), [(2, ()), (BATCH, (1,))])
@pytest.mark.parametrize(("kind", "match"), REFUSED)
def test_what_is_not_exact_is_refused_in_words_whenever_the_batch_is_split(
    kind: type[Toy], match: str, size: int, fails_at: tuple[int, ...]
) -> None:
    assert_refused(kind, match, size, fails_at)


@pytest.mark.parametrize("kind", [SumLoss, Contrastive, Normalised])
def test_the_whole_share_at_once_needs_no_check(kind: type[Toy]) -> None:
    _, ours = assert_exact(kind, BATCH)
    assert len(ours.record) == 8


@pytest.mark.parametrize("kind", [Contrastive, Normalised])
def test_a_later_shrink_is_refused_with_the_weights_of_the_last_good_step(kind: type[Toy]) -> None:
    before, module = kind(), recording(kind)
    fit(before, max_steps=2, max_epochs=-1)
    module.fails_at = (3,)
    with pytest.raises(MisconfigurationException, match="Samples affect each other|normalise with"):
        fit(module, MicroBatching(micro_batch_size=BATCH), max_epochs=2)
    assert module.trainer.global_step == 2
    assert difference(module, before) == 0.0


# --- 2: the check sees what matters -----------------------------------------------------------------------------------


def test_a_step_that_fails_on_one_sample_is_refused() -> None:
    assert_refused(FunctionalNorm, "can't be run on 1 samples of the batch alone: ValueError: Expected more than 1", 1)


# --- 2: what the step writes on the module ----------------------------------------------------------------------------


class Listing(Toy):
    """Keeps the loss of every batch and the first number of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.firsts: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.losses.append(loss.detach())
        self.firsts += batch[0][:, 0].tolist()
        return loss


def test_lists_keep_what_every_micro_batch_adds() -> None:
    with pytest.warns(match="changes `losses` of the module per micro-batch"):
        plain, ours = assert_exact(Listing, 4, (2, 6))
    assert len(ours.losses) > len(plain.losses)
    assert ours.firsts == plain.firsts


# --- 4: steps that change what they are given -------------------------------------------------------------------------


class FailingLate(Recording, InPlace):
    """Memory runs out after the batch has been changed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fails_at, self.fails_at = self.fails_at, ()
        loss = super().training_step(batch, batch_idx)
        self.fails_at = fails_at
        if not is_checking() and len(self.record) in fails_at:
            raise out_of_memory()
        return loss


@pytest.mark.parametrize(("size", "fails_at"), [(BATCH, (3,)), (4, (2, 4))])
def test_every_repeat_gets_the_loaders_batch(size: int, fails_at: tuple[int, ...]) -> None:
    assert_exact(FailingLate, size, fails_at)


def test_an_own_generator_goes_on_as_without_checks_and_repeats() -> None:
    plain, ours = Noisy(), recording(Noisy)
    fit(plain, max_epochs=2)
    ours.fails_at = (3,)
    fit(ours, MicroBatching(micro_batch_size=BATCH), max_epochs=2, max_steps=2)
    two = Noisy()
    fit(two, max_steps=2)
    assert difference(two, ours) == 0.0
    assert torch.equal(two.noise.get_state(), ours.noise.get_state())


# --- 4: no trace ------------------------------------------------------------------------------------------------------


class Written(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def log_metrics(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(metrics)


class Logging(Recording):
    """Counts its samples, and writes to the logger itself if it is told to."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.checked = Record()

    def loss(self, batch: Any) -> Tensor:
        if is_checking():
            for _ in batch[0]:
                self.checked.append(1)
        loss = super().loss(batch)
        self.log("loss", loss)
        if self.writes:
            self.logger.log_metrics({"own": float(loss)})
        return loss


class WritingLogs(Logging):
    writes = True


def test_checks_write_nothing_to_the_logger() -> None:
    """The whole share at once, smaller from the third step on: a check and a repeat."""
    module, logger = WritingLogs(), Written()
    module.fails_at = (3,)
    with pytest.warns(UserWarning, match="writes `own` to the logger itself"):
        fit(module, MicroBatching(micro_batch_size=BATCH), logger=logger, log_every_n_steps=1)
    assert len(module.checked) > 0
    assert sum("own" in metrics for metrics in logger.calls) == 2 + 2 * 6
    assert sum("loss" in metrics for metrics in logger.calls) == 8


class Snapshot(pl.Callback):
    """What the run is like right before the first batch is run for good: weights, states, generators, attributes."""

    def __init__(self) -> None:
        self.at_start: dict[str, Any] = {}
        self.at_first: dict[str, Any] = {}

    @staticmethod
    def of(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        own = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, list))}
        return copy.deepcopy(
            {
                "weights": dict(module.state_dict()),
                "gradients": [p.grad for p in module.parameters()],
                "optimizer": trainer.optimizers[0].state_dict(),
                "random": torch.get_rng_state(),
                "own": {k: v for k, v in own.items() if not k.startswith("_")},
                "attributes": sorted(vars(module)),
                "slots": {name: reading_of(place.read()) for name, place in places_of(module).items()},
            }
        )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not self.at_start:
            self.at_start = self.of(trainer, pl_module)
            pl_module.first = lambda: self.at_first or self.at_first.update(self.of(trainer, pl_module))
            self.at_start = self.of(trainer, pl_module)


@pytest.mark.parametrize("kind", [Logging, Made, Teacher, Spectral, Dropping])
def test_the_check_leaves_no_trace(kind: type[Toy]) -> None:
    class Watched(kind):  # type: ignore[valid-type, misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if is_checking():
                checks.append(1)
            else:
                self.first()
            return super().training_step(batch, batch_idx)

    checks: list[int] = []
    module, snapshot = Watched(), Snapshot()
    fit(module, snapshot, MicroBatching(micro_batch_size=2), max_steps=1)
    assert checks
    assert snapshot.at_first.keys() == snapshot.at_start.keys()
    for name, value in snapshot.at_start.items():
        assert alike(reading_of(value), reading_of(snapshot.at_first[name]), 0.0), name


@pytest.mark.parametrize(
    ("size", "is_limited", "samples"), [(2, True, 2), (5, True, 3), (2, False, BATCH), (BATCH, True, 0)]
)
def test_the_check_runs_few_samples_four_times(size: int, is_limited: bool, samples: int) -> None:
    """Twice together and in parts, as many as a micro-batch has, at the first and the second split step."""
    module = Logging()
    limit = [MemoryLimit("1GiB")] if is_limited else []
    fit(module, MicroBatching(micro_batch_size=size), *limit, max_steps=3)
    assert len(module.checked) == 2 * 4 * samples


class WithTwice(Toy):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return TwiceSGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("fails_at", [(), (3,)])
def test_optimizers_that_call_their_closure_twice_get_gradients_at_both_weights(fails_at: tuple[int, ...]) -> None:
    assert_exact(WithTwice, 2, fails_at)


def test_closures_called_twice_with_accumulation_are_refused() -> None:
    module = WithTwice()
    before = module.net[0].weight.detach().clone()
    with pytest.raises(MisconfigurationException, match="calls its closure more than once"):
        fit(module, MicroBatching(micro_batch_size=2), accumulate_grad_batches=2)
    assert torch.equal(module.net[0].weight, before)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", [TwiceSGD, torch.optim.LBFGS])
def test_sizes_are_found_for_optimizers_that_need_their_closure(optimizer: Any) -> None:
    class Searched(Toy):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self.parameters(), lr=0.1)

    plain, ours = Searched(), Searched()
    fit(plain)
    fit(ours, MicroBatching(), MemoryLimit("1MiB"))
    # LBFGS makes 1e-6 of the rounding of any fixed size.
    assert difference(plain, ours) < (1e-5 if optimizer is torch.optim.LBFGS else 1e-9)


@pytest.mark.parametrize(("start", "ends_at"), [(0, 0), (11, 15)])
def test_steps_that_begin_to_write_to_weights_are_refused(start: int, ends_at: int) -> None:
    module = type("Shrinks", (Shrinks,), {"start": start})()
    with pytest.raises(MisconfigurationException, match=r"sees: `net\.0\.weight`"):
        fit(module, MicroBatching(micro_batch_size=2), max_epochs=8)
    assert module.trainer.global_step == ends_at


@pytest.mark.parametrize("fails_at", [(), (8,)])
def test_what_a_zero_grad_hook_writes_is_seen_so_in_windows(fails_at: tuple[int, ...]) -> None:
    plain, ours = Cleared(), recording(Cleared)
    fit(plain, accumulate_grad_batches=2)
    ours.fails_at = fails_at
    fit(ours, MicroBatching(micro_batch_size=2), accumulate_grad_batches=2)
    assert difference(plain, ours) < 1e-9
    assert plain.share == ours.share


@pytest.mark.parametrize("kind", [ShrinksWhenCleared, Clipped])
def test_a_zero_grad_hook_that_writes_to_weights_is_refused(kind: type[Toy]) -> None:
    with pytest.raises(MisconfigurationException, match=r"`on_before_zero_grad` .* changes `net\.0\.weight`"):
        fit(kind(), MicroBatching(micro_batch_size=2))
    assert_exact(kind, BATCH)


# --- gradients that are not finite show nothing -----------------------------------------------------------------------


class Half(Toy):
    """Runs in half precision only, as many kernels do, where gradients overflow at the scaler's first scales."""

    needs_half = True

    def __init__(self) -> None:
        super().__init__()
        self.net.float()

    def output(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch[0].float())
        if self.needs_half and hidden.dtype is not torch.float16:
            raise RuntimeError("Only half precision is supported.")
        return self.net[2](hidden.tanh()).float()

    def loss(self, batch: Any) -> Tensor:
        return 300 * functional.mse_loss(self.output(batch), batch[1].float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class HalfContrastive(Half):
    def loss(self, batch: Any) -> Tensor:
        output = 3 * self.output(batch)
        return 300 * functional.cross_entropy(output @ output.T, torch.arange(len(output)))


class ContrastiveBeforeHalf(HalfContrastive):
    needs_half = False


def with_scaler(module: Half, *callbacks: pl.Callback) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    fit(module, *callbacks, max_epochs=2, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    return scaler.get_scale()


@pytest.mark.parametrize("kind", [HalfContrastive, ContrastiveBeforeHalf])
def test_contrastive_losses_are_refused_while_gradients_overflow(kind: type[Half]) -> None:
    with pytest.raises(MisconfigurationException, match="Samples affect each other"):
        with_scaler(kind(), MicroBatching(micro_batch_size=2))


def test_micro_batches_are_exact_while_gradients_overflow() -> None:
    plain, ours = Half(), Half()
    scale = with_scaler(plain)
    assert scale < 2.0**16, "gradients should have overflown"
    assert with_scaler(ours, MicroBatching(micro_batch_size=2)) == scale
    assert difference(plain, ours) < 1e-3


def with_nan() -> DataLoader:
    dataset = regression().dataset
    inputs, targets = (tensor.clone() for tensor in dataset.tensors)
    inputs[1] = torch.nan
    return loader(inputs, targets)


class BrokenFirst(Counting):
    """Has a first batch without a gradient, whose step is left out."""

    make_loader = staticmethod(with_nan)


class ContrastiveBrokenFirst(Contrastive):
    make_loader = staticmethod(with_nan)


def test_a_batch_without_finite_gradients_settles_nothing() -> None:
    with pytest.raises(MisconfigurationException, match="Samples affect each other"):
        fit(ContrastiveBrokenFirst(), MicroBatching(micro_batch_size=2), NonFiniteGuard(), max_epochs=2)


def test_a_batch_without_finite_gradients_is_no_reason_to_refuse() -> None:
    plain, ours = BrokenFirst(), BrokenFirst()
    fit(plain, NonFiniteGuard(), max_epochs=2)
    fit(ours, MicroBatching(micro_batch_size=2), NonFiniteGuard(), max_epochs=2)
    assert difference(plain, ours) < 1e-9
    assert [value.tolist() for value in plain.buffers()] == [value.tolist() for value in ours.buffers()]


# --- windows of `accumulate_grad_batches` -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Popping, InPlace])
def test_earlier_batches_of_a_window_are_repeated_as_the_loader_gave_them(kind: type[Toy]) -> None:
    plain, ours = kind(), recording(kind)
    fit(plain, MicroBatching(micro_batch_size=3), max_epochs=1, accumulate_grad_batches=2)
    ours.fails_at = (2, 10)  # in the second batch of each window, at first whole and then in halves
    fit(ours, MicroBatching(micro_batch_size=BATCH), max_epochs=1, accumulate_grad_batches=2)
    assert difference(plain, ours) < 1e-9


class Labelled(Tokens):
    """The loss is a mean over tokens, of which all samples of a batch have equally many, but for the last batches."""

    sizes: tuple[int, ...] = (BATCH, BATCH)
    num_equal = -1
    weight_of = staticmethod(lambda batch: int((batch["answers"] != -100).sum()))

    @classmethod
    def make_loader(cls) -> DataLoader:
        ids, labels = tokens()
        equal = sum(cls.sizes[: cls.num_equal])
        labels[:equal] = ids[:equal].roll(1, 1)
        labels[cls.sizes[0] : equal, -1] = -100
        rows = [{"ids": one, "answers": other} for one, other in zip(ids, labels, strict=True)]
        ends = [sum(cls.sizes[: index + 1]) for index in range(len(cls.sizes))]
        batches = [list(range(end - size, end)) for size, end in zip(cls.sizes, ends, strict=True)]
        return DataLoader(rows, batch_sampler=batches)

    def loss(self, batch: Any) -> Tensor:
        return self.labelled(batch["ids"], batch["answers"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OverSamples(Labelled):
    """The loss is a mean over samples, though it might be one over `labels`."""

    weight_of = staticmethod(lambda batch: len(batch["ids"]))

    @classmethod
    def make_loader(cls) -> DataLoader:
        loader = super().make_loader()
        rows = [{"ids": row["ids"], "labels": row["answers"]} for row in loader.dataset]
        return DataLoader(rows, batch_sampler=loader.batch_sampler)

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch["ids"]).transpose(1, 2)
        return functional.cross_entropy(logits, batch["labels"], reduction="none").sum(1).mean()


def stepped(kind: type[Labelled], window: int) -> Labelled:
    """Take the steps of an epoch by hand, each on the mean of a window."""
    module = kind()
    optimizer, batches = module.configure_optimizers(), list(module.train_dataloader())
    for start in range(0, len(batches), window):
        parts = batches[start : start + window]
        weights = [module.weight_of(batch) for batch in parts]
        optimizer.zero_grad()
        for batch, weight in zip(parts, weights, strict=True):
            (module.loss(batch) * weight / sum(weights)).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("kind", [Labelled, OverSamples])
def test_a_rule_that_is_found_within_a_window_holds_for_all_of_it(
    kind: type[Labelled], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (BATCH, BATCH, BATCH)
    monkeypatch.setattr(kind, "sizes", sizes)
    ours = kind()
    fit(ours, MicroBatching(micro_batch_size=3), max_epochs=1, accumulate_grad_batches=len(sizes))
    assert difference(ours, stepped(kind, len(sizes))) < 1e-9


@pytest.mark.parametrize(("can_repeat", "size", "tried"), [(True, 8, [6, 3, 2]), (False, 8, [4, 2, 2])])
def test_memory_that_never_suffices_ends_the_comparison_on_ranks_with_other_batches_alike(
    can_repeat: bool, size: int, tried: list[int]
) -> None:
    """Where a shortage ends the run, there is room for what a comparison holds beside a step."""
    counts: list[int] = []

    class Failing(SelfCheck):
        def _attempt(self, samples: Any) -> Any:
            counts.append(samples.count)
            return 1, out_of_memory()

    told = iter([8, 4, 2])  # of another rank
    consensus: Any = SimpleNamespace(
        world_size=1,
        can_repeat=can_repeat,
        exchange=lambda *mine, at: [mine, (1, next(told))],
    )
    memory: Any = SimpleNamespace(reset_peak=lambda: None)
    anything: Any = None
    splitter: Any = SimpleNamespace(cuts=lambda batch: frozenset())
    options: Any = SimpleNamespace(allow_batch_statistics=False)
    fitting = Fitting(anything, splitter, LossWeights(), consensus, memory, options, None, anything, anything)
    check = Failing(fitting, anything)
    with pytest.warns(UserWarning, match="not even two samples"):
        check.run(anything, anything, num_samples=2 * size - 4, size=size, has_failed=False)
    assert counts == tried


def test_windows_that_a_callback_makes_longer_weigh_whole_batches_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labelled, "sizes", (BATCH, 2, BATCH, 2))
    monkeypatch.setattr(Labelled, "num_equal", 0)
    ours, plain = Labelled(), stepped(Labelled, 1)
    fit(ours, GradientAccumulationScheduler({1: 2}), MicroBatching(micro_batch_size=3), max_epochs=2)
    optimizer, batches = plain.configure_optimizers(), list(plain.train_dataloader())
    for first, second in (batches[:2], batches[2:]):
        one, two = plain.weight_of(first), plain.weight_of(second)
        optimizer.zero_grad()
        ((plain.loss(first) * one + plain.loss(second) * two) / (one + two)).backward()
        optimizer.step()
    assert difference(ours, plain) < 1e-9


def test_losses_stay_in_the_range_of_float16_where_a_windows_first_batch_counts_nothing() -> None:
    ours = FirstMasked()
    fit(ours, MicroBatching(micro_batch_size=BATCH), max_epochs=1, accumulate_grad_batches=2)
    assert 0.0 < ours.largest < 100.0
    assert all(p.isfinite().all() for p in ours.parameters())


def test_an_epoch_for_batch_norms_keeps_no_batches() -> None:
    kept: list[int] = []

    class Averaged(Normalised):
        def on_train_batch_end(self, *_: Any) -> None:
            loop: Any = self.trainer.fit_loop.epoch_loop.automatic_optimization
            kept.append(len(loop.run_step.__self__._window.past))

    plain, ours = Normalised(), Averaged()
    fit(plain, StochasticWeightAveraging(0.01, swa_epoch_start=1), max_epochs=2)
    fit(ours, StochasticWeightAveraging(0.01, swa_epoch_start=1), MicroBatching(micro_batch_size=BATCH), max_epochs=2)
    assert set(kept) == {0}
    assert difference(plain, ours) == 0.0
    assert torch.equal(plain.norm.running_mean, ours.norm.running_mean)


class Holder:
    """Holds a metric, of which torch knows nothing."""

    def __init__(self) -> None:
        self.metric = MeanSquaredError()


class Hidden(Toy):
    """Keeps metrics in a dict, a list and an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"one": MeanSquaredError(), "others": [MeanSquaredError()], "third": Holder()}

    @property
    def metrics(self) -> list[MeanSquaredError]:
        return [self.kept["one"], self.kept["others"][0], self.kept["third"].metric]

    def loss(self, batch: Any) -> Tensor:
        found = self.net(batch[0])
        for metric in self.metrics:
            metric.update(found.detach().contiguous(), batch[1].contiguous())
        return functional.mse_loss(found, batch[1])


def test_metrics_that_torch_does_not_see_count_every_sample_once() -> None:
    plain, ours = both(Hidden, BATCH, (3,))
    for found, wanted in zip(ours.metrics, plain.metrics, strict=True):
        assert int(found.total) == int(wanted.total)
        torch.testing.assert_close(found.compute(), wanted.compute())
