"""The monitor on real fits: figures, logging, table, reuse of a limit's ledger, and what it costs."""

import csv
import gc
import re
from itertools import accumulate

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.memory import GIB, Category
from lightning_memfit.memory.allocations import allocation_events, profiler_runs
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from tests.helpers.trainers import fit


class Language(LightningModule):
    """A language model of one embedding, with batches that hold `input_ids`."""

    def __init__(self, num_batches=12):
        super().__init__()
        self.num_batches = num_batches
        self.table = torch.nn.Embedding(64, 64)

    def training_step(self, batch, batch_idx):
        tokens = batch["input_ids"]
        return torch.nn.functional.cross_entropy(self.table(tokens).flatten(0, 1), tokens.flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self):
        data = [{"input_ids": torch.arange(4)} for _ in range(4 * self.num_batches)]
        return torch.utils.data.DataLoader(data, batch_size=4)

    val_dataloader = train_dataloader


def train(tmp_path, *callbacks, module=None, **options):
    options = {"max_epochs": 1, "log_every_n_steps": 5, "default_root_dir": tmp_path} | options
    return fit(module or Language(), *callbacks, **options)


WEIGHTS = 64 * 64 * 4


def test_float32_masters_gradients_states_and_buffers_count_as_host_memory(tmp_path):
    class Frozen(Language):
        def __init__(self):
            super().__init__()
            self.frozen = torch.nn.Parameter(torch.ones(100), requires_grad=False)
            self.register_buffer("scale", torch.ones(8))

    monitor = MemoryMonitor(tracked_steps=0, every_n_steps=1)
    trainer = train(tmp_path, HostMasterWeights(), monitor, module=Frozen(), precision="bf16-true")
    figures = {
        name: round(float(trainer.callback_metrics[f"memory/{name}_gib"]) * GIB) for name in ("parameter", "buffer")
    }
    assert figures == {"parameter": WEIGHTS // 2 + 200, "buffer": 16}
    assert "memory/gradient_gib" not in trainer.callback_metrics
    assert "memory/optimizer_state_gib" not in trainer.callback_metrics
    assert monitor.report.host_bytes == 4 * WEIGHTS + 4 + 400 + 32


def test_categories_are_exact_and_the_ledger_leaves(tmp_path):
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append("training_step" in vars(trainer.strategy))

    monitor = MemoryMonitor(tracked_steps=3)
    train(tmp_path, Watch(), monitor)
    measured = monitor.report.measured
    assert measured.get(Category.PARAMETER) == measured.get(Category.GRADIENT) == WEIGHTS
    assert measured.get(Category.OPTIMIZER_STATE) == 2 * WEIGHTS + 4
    assert measured.get(Category.INPUT) == 4 * 4 * 8
    assert seen == [True] * 3 + [False] * 9
    assert monitor.report.measured_over == "the first 3 optimizer steps"


class Lazy(Language):
    """Its weights are made by the first forward."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Sequential(torch.nn.LazyLinear(64, bias=False), torch.nn.LazyBatchNorm1d(affine=False))

    def training_step(self, batch, batch_idx):
        tokens = batch["input_ids"].flatten()
        return torch.nn.functional.cross_entropy(self.head(self.table(tokens)), tokens)


@pytest.mark.parametrize("callbacks", [[], [MemoryLimit("1GiB")]], ids=["alone", "under a limit"])
def test_weights_that_the_first_forward_makes_are_measured(tmp_path, callbacks):
    monitor = MemoryMonitor(tracked_steps=3)
    train(tmp_path, *callbacks, monitor, module=Lazy())
    measured = monitor.report.measured
    assert measured.total() > 4 * 2 * WEIGHTS
    if not callbacks:
        assert measured.get(Category.PARAMETER) == 2 * WEIGHTS
        assert measured.get(Category.BUFFER) == 2 * 64 * 4 + 8
        assert measured.get(Category.OPTIMIZER_STATE) == 2 * (2 * WEIGHTS + 4)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_optimizer_steps_are_counted(tmp_path, accumulate):
    steps = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *args):
            steps.append((monitor._num_steps, trainer.global_step))

    monitor = MemoryMonitor(tracked_steps=1)
    schedule = GradientAccumulationScheduler({0: 1, 1: 2, 2: accumulate})
    train(tmp_path, monitor, Watch(), schedule, max_epochs=4)
    assert steps
    assert all(counted == taken for counted, taken in steps)


def test_parameters_that_wrap_other_tensors_stay_parameters(tmp_path):
    """As FSDP2's do, whose own storages hold nothing."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Wrapped(Language):
        def configure_optimizers(self):
            halves = self.table.weight.detach()
            self.table.weight = torch.nn.Parameter(TwoTensor(halves.clone(), halves.clone()))
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def training_step(self, batch, batch_idx):
            return self.table.weight.square().mean()

    monitor = MemoryMonitor()
    train(tmp_path, monitor, module=Wrapped(), limit_val_batches=0)
    assert monitor.report.measured.get(Category.PARAMETER) == 2 * WEIGHTS
    assert monitor.report.measured.get(Category.OPTIMIZER_STATE) == 0


def test_the_table_tells_the_run(tmp_path, capsys):
    train(tmp_path, MemoryMonitor(), max_epochs=2)
    text = capsys.readouterr().out
    for words in (
        "not predicted",
        "gradient",
        "process RSS",
        "tokens/s",
        "val_loss",
        " -> ",
        "24 optimizer steps",
    ):
        assert words.replace(" ", "") in re.sub(r"[│\s]", "", text)  # long paths are broken anywhere


def test_memory_by_category_is_logged_over_time(tmp_path):
    """What lies there between steps, all the time; the peak's categories while tensors are followed."""
    rows = logged(tmp_path, MemoryMonitor(tracked_steps=3, every_n_steps=1))
    held = [row for row in rows if row.get("memory/parameter_gib")]
    assert [int(row["step"]) for row in held] == list(range(12))
    for row in held:
        assert float(row["memory/parameter_gib"]) * 2**30 == WEIGHTS
        assert float(row["memory/gradient_gib"]) * 2**30 == WEIGHTS
        assert float(row["memory/optimizer_state_gib"]) * 2**30 == 2 * WEIGHTS + 4
    peaks = [row for row in rows if row.get("memory/activation_peak_gib")]
    assert [int(row["step"]) for row in peaks] == [0, 1, 2]
    for row in peaks:
        live, working = (float(row[f"memory/{name}_gib"]) * 2**30 for name in ("live_peak", "working_peak"))
        assert live == pytest.approx(sum(float(v) * 2**30 for k, v in row.items() if v and is_peak_of_category(k)))
        assert working == pytest.approx(live - 4 * WEIGHTS - 4)


def is_peak_of_category(name):
    return any(name == f"memory/{category}_peak_gib" for category in Category)


def logged(tmp_path, *callbacks):
    train(tmp_path, *callbacks, logger=CSVLogger(tmp_path, name="csv", version=0))
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("limit_first", [True, False])
def test_a_limits_ledger_is_used_in_any_order(tmp_path, limit_first):
    monitor, limit = MemoryMonitor(), MemoryLimit("8MiB")
    train(tmp_path, *((limit, monitor) if limit_first else (monitor, limit)))
    assert monitor.report.measured.total() == limit.ledger.peak_bytes
    assert monitor.report.measured_over == "the whole run"
    assert monitor.report.limit_bytes == limit.limit_bytes
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


class Kept(Language):
    """Keeps the outputs of a validation until its end and joins them, as in Lightning's issues 8453 and 5735."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def validation_step(self, batch, batch_idx):
        self.kept.append(self.table(batch["input_ids"]).repeat(64, 1, 1))

    def on_validation_epoch_end(self):
        torch.cat(self.kept)
        self.kept.clear()


@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_peaks_of_training_and_validation_are_told_apart(tmp_path, capsys, sanity_steps):
    alone, monitor = MemoryMonitor(), MemoryMonitor()
    train(tmp_path, alone, MemoryLimit("64MiB"), limit_val_batches=0)
    train(tmp_path, monitor, MemoryLimit("64MiB"), module=Kept(), num_sanity_val_steps=sanity_steps)
    kept = 12 * 64 * 4 * 4 * 64 * 4
    assert monitor.report.measured_peak_bytes == alone.report.measured_peak_bytes
    assert monitor.report.validation_peak_bytes > 2 * kept, "with what the end of the epoch joins"
    assert alone.report.validation_peak_bytes is None
    assert "peak in validation" in capsys.readouterr().out


def test_the_monitor_changes_no_number(tmp_path):
    torch.manual_seed(0)
    plain, watched = Language(), Language()
    watched.load_state_dict(plain.state_dict())
    train(tmp_path, module=plain)
    train(tmp_path, MemoryMonitor(), module=watched)
    assert torch.equal(plain.table.weight, watched.table.weight)


def test_an_exception_takes_the_ledger_off(tmp_path):
    class Failing(Callback):
        def on_before_backward(self, *args):
            raise KeyError("stop")

    monitor = MemoryMonitor()
    with pytest.raises(KeyError):
        train(tmp_path, monitor, Failing())
    assert monitor.report is None
    monitor_again = train(tmp_path, monitor)
    assert "training_step" not in vars(monitor_again.strategy)
    assert monitor.report.num_steps == 12


def test_what_goes_wrong_in_a_monitor_ends_no_run(tmp_path):
    """A loss of another name, or a report that can't be written, ended it after an epoch, or when all was trained."""
    (tmp_path / "file").write_text("mine")
    monitor = MemoryMonitor(report_path=tmp_path / "file" / "report.json")
    with pytest.warns(UserWarning, match=r"`report_path='.*report.json'` can't be written: File exists"):
        train(tmp_path, monitor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_figures_are_reported(tmp_path, capsys):
    monitor = MemoryMonitor()
    train(tmp_path, monitor, accelerator="gpu", devices=1)
    report = monitor.report
    assert report.measured.get(Category.PARAMETER) == WEIGHTS
    assert report.peak_reserved_bytes >= report.peak_allocated_bytes >= report.measured.total()
    assert "peak allocated (CUDA)" in capsys.readouterr().out


# --- exact peaks ------------------------------------------------------------------------------------------------------


class Compared(LightningModule):
    """Nearly all memory is what the loss's kernel takes, which tracking tensors doesn't show."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(512))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(batch * self.scale, torch.zeros_like(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(256, 512), batch_size=64)


BATCH = 64 * 512 * 4


def test_an_exact_peak_holds_what_kernels_take(tmp_path):
    tracked, exact = MemoryMonitor(), MemoryMonitor(exact=True)
    train(tmp_path, tracked, module=Compared())
    train(tmp_path, exact, module=Compared())
    assert tracked.report.exact_peak_bytes is None
    assert exact.report.measured_peak_bytes == exact.report.exact_peak_bytes
    assert exact.report.exact_peak_bytes >= exact.report.measured.total() + 0.9 * BATCH
    gc.collect()  # what earlier tests left must not be freed in between
    with allocation_events() as changes:
        module = Compared()
        train(tmp_path, module=module, max_steps=3)
    truth = max(accumulate(changes)) - 256 * 512 * 4  # the data set, which lies in memory before the run
    assert exact.report.exact_peak_bytes == pytest.approx(truth, rel=0.03)
    assert "inside kernels" not in exact.report.table().caption
    assert "MemoryMonitor(exact=True)" in tracked.report.table().caption


class KeepsACopy(Callback):
    def on_fit_start(self, trainer, pl_module):
        self.kept = {"copy": [torch.zeros(200_000)], "weights": pl_module.scale, "trainer": trainer}


def test_an_exact_peak_holds_what_callbacks_made_before(tmp_path):
    plain, beside = MemoryMonitor(exact=True), MemoryMonitor(exact=True)
    train(tmp_path, plain, module=Compared())
    train(tmp_path, beside, KeepsACopy(), module=Compared())
    more = beside.report.exact_peak_bytes - plain.report.exact_peak_bytes
    assert more == pytest.approx(4 * 200_000, rel=0.01)


@pytest.mark.parametrize("exact", [False, True])
def test_averages_of_weights_are_in_the_measured_peak(tmp_path, exact):
    """Lightning makes them before training starts, and keeps their number of updates beside them."""
    plain, beside = MemoryMonitor(exact=exact), MemoryMonitor(exact=exact)
    train(tmp_path, plain, module=Compared())
    train(tmp_path, beside, EMAWeightAveraging(), module=Compared())
    more = beside.report.measured_peak_bytes - plain.report.measured_peak_bytes
    assert more == pytest.approx(sum(p.nbytes for p in Compared().parameters()), abs=16)


def test_an_exact_monitor_refuses_another_profiler_and_leaves_it_alone(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with pytest.raises(MisconfigurationException, match=r"exact=True.*profiler"):
            train(tmp_path, MemoryMonitor(exact=True), module=Compared())
        torch.ones(3)
    assert any(event.key == "aten::ones" for event in profiler.key_averages())
    with pytest.raises(MisconfigurationException, match=r"exact=True.*profiler"):
        train(tmp_path, MemoryMonitor(exact=True), module=Compared(), profiler="pytorch")


def test_no_profiler_is_left_running(tmp_path):
    class Failing(Compared):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, MemoryMonitor(exact=True), module=Failing())
    assert not profiler_runs()
    with pytest.raises(ValueError, match="tracked_steps"):
        MemoryMonitor(exact=True, tracked_steps=0)
