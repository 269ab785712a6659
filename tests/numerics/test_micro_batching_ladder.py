"""`MicroBatching(last_resort=...)`: what happens when not even one sample fits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_memfit.checkpointing.apply import CheckpointedForward
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.recovery.host_states import absent_bytes
from lightning_memfit.fitting.size import sizes as backoff
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.helpers.fitting import out_of_memory
from tests.helpers.trainers import difference, fit, fit_on_two_ranks, quiet_trainer

WIDTH, ROWS, SAMPLES, NUM_BLOCKS = 64, 512, 4, 6
RECOMPUTED = "the activations of 6 more blocks recomputed in backward"
INPUTS = "the inputs of 6 recomputed blocks in host memory"
STATES = "optimizer states in host memory between steps (1.50 MiB)"


class Blocks(pl.LightningModule):
    """Six blocks whose activations are larger than everything else, and AdamW, whose states come next.

    Args:
        num_batches: Batches of an epoch.
        momentum: False for an optimizer without states.
    """

    def __init__(self, num_batches: int = 2, momentum: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
            for _ in range(NUM_BLOCKS)
        )
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.num_batches = num_batches
        self.momentum = momentum

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.momentum:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(self.num_batches * SAMPLES, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        ranks = self.trainer.world_size
        sampler = DistributedSampler(TensorDataset(x), shuffle=False) if ranks > 1 else None
        return DataLoader(TensorDataset(x), SAMPLES // ranks, sampler=sampler)

    @property
    def recomputed(self) -> list[CheckpointedForward]:
        forwards = (vars(block).get("forward") for block in self.blocks)
        return [
            forward for forward in forwards if isinstance(forward, CheckpointedForward) and forward.choice == "full"
        ]


class Failing(Blocks):
    """Runs out of memory on one rank as long as a condition holds, from the second step on."""

    def __init__(self, lacks: Callable[["Failing"], bool], rank: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lacks = lacks
        self.rank = rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self.rank and self.trainer.global_step and self.lacks(self):
            raise out_of_memory()
        return super().training_step(batch, batch_idx)


RUNGS: list[Callable[[Failing], bool]] = [
    lambda module: False,
    lambda module: not module.recomputed,
    lambda module: not any(forward.inputs_on_host for forward in module.recomputed),
    lambda module: not absent_bytes(module.trainer.optimizers[0]),
]


class Peaks(pl.Callback):
    """Peaks of the last effective batch: of forward and backward, and of the optimizer's step."""

    def __init__(self, limit: MemoryLimit) -> None:
        self.limit = limit
        self.work_bytes = self.step_bytes = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.work_bytes = self._reset()

    def on_train_batch_end(self, *_: Any) -> None:
        self.step_bytes = self._reset()

    def _reset(self) -> int:
        assert self.limit.ledger is not None
        peak = self.limit.ledger.peak_bytes
        self.limit.ledger.reset_peak()
        return peak


def ladder(**options: Any) -> MicroBatching:
    return MicroBatching(micro_batch_size=1, last_resort="offload", **options)


def reasons(callback: MicroBatching) -> list[str]:
    return [reason for _, _, reason in callback.changes[1:]]


def trained(module: Blocks, *callbacks: pl.Callback, **options: Any) -> Blocks:
    pl.seed_everything(3)
    fit(module, *callbacks, **options)
    return module


def undisturbed(**options: Any) -> Blocks:
    return trained(Blocks(**options), MicroBatching(micro_batch_size=1))


@pytest.fixture(scope="module")
def peaks() -> list[Peaks]:
    """What the last batch takes after none, one, two and three rungs."""
    found = []
    for lacks in RUNGS:
        limit = MemoryLimit("1GiB")
        found.append(Peaks(limit))
        trained(Failing(lacks), limit, ladder(), found[-1])
    return found


@pytest.fixture(scope="module")
def tight(peaks: list[Peaks]) -> int:
    """Bytes that one sample fits in only after all three rungs."""
    return (peaks[2].work_bytes + peaks[3].work_bytes) // 2


@pytest.fixture(scope="module")
def limit() -> int:
    """Bytes that one sample fits in only where all blocks are recomputed."""

    def peak_bytes(*callbacks: pl.Callback) -> int:
        limit = MemoryLimit("1GiB")
        fit(Blocks(momentum=False), limit, MicroBatching(micro_batch_size=1), *callbacks)
        assert limit.ledger is not None
        return limit.ledger.peak_bytes

    plain, selective = peak_bytes(), peak_bytes(ActivationCheckpointing("selective", keep=["matmul"]))
    least = peak_bytes(ActivationCheckpointing())
    assert least < 0.9 * min(plain, selective)
    return (least + min(plain, selective)) // 2


# --- the rungs ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly_cases("plain")
@pytest.mark.parametrize(
    "others", [[], [ActivationCheckpointing("selective", keep=["matmul"])]], ids=["plain", "selective"]
)
def test_blocks_are_recomputed_instead_of_ending_the_run(limit: int, others: list[pl.Callback]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="one sample does not fit"):
        fit(Blocks(momentum=False), MemoryLimit(limit), MicroBatching(micro_batch_size=1), *others)
    ours = MicroBatching(micro_batch_size=1, last_resort="recompute")
    module = trained(Blocks(momentum=False), MemoryLimit(limit), ours, *others)
    assert reasons(ours) == [f"from now on with {RECOMPUTED}"]
    assert difference(module, undisturbed(momentum=False)) == 0
    assert all("forward" not in vars(block) for block in module.blocks)


@pytest.mark.nightly
def test_every_rung_lowers_the_peak_and_states_are_on_the_device_in_the_step_only(peaks: list[Peaks]) -> None:
    work = [one.work_bytes for one in peaks]
    assert work == sorted(work, reverse=True)
    assert work[1] - work[2] >= 3 * ROWS * WIDTH * 4  # of six inputs, those of two or three blocks are on their way
    states_bytes = 2 * NUM_BLOCKS * 2 * 4 * WIDTH * WIDTH * 4
    assert work[2] - work[3] == states_bytes
    assert len({one.step_bytes for one in peaks}) == 1


@pytest.mark.nightly
def test_host_memory_is_used_where_recomputation_is_not_enough(tight: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="even with the activations of 6 more blocks") as failure:
        trained(Blocks(), MemoryLimit(tight), MicroBatching(micro_batch_size=1, last_resort="recompute"))
    assert "last_resort='offload'" in str(failure.value)
    ours, device = ladder(), MemoryLimit(tight)
    module = trained(Blocks(), device, ours)
    assert module.trainer.global_step == 4
    assert reasons(ours) == [f"from now on with {what}" for what in (RECOMPUTED, INPUTS, STATES)]
    assert [step for step, *_ in ours.changes] == [0, 0, 1, 1]
    assert difference(module, undisturbed()) == 0
    assert device.ledger is not None
    assert device.ledger.peak_bytes <= tight


@pytest.mark.nightly_cases("1")
@pytest.mark.parametrize("window", [1, 2])
def test_a_run_whose_first_trial_does_not_fit_begins_with_one_sample(tight: int, window: int) -> None:
    """The second rung is taken for the second batch of a window, of which the first is repeated then."""
    ours, options = MicroBatching(last_resort="offload"), {"accumulate_grad_batches": window, "max_epochs": 1}
    module = trained(Blocks(num_batches=4), MemoryLimit(tight), ours, **options)
    assert "not even one sample fits" in ours.changes[0][2]
    assert reasons(ours) == [f"from now on with {what}" for what in (RECOMPUTED, INPUTS, STATES)]
    assert difference(module, trained(Blocks(num_batches=4), MicroBatching(micro_batch_size=1), **options)) == 0


def test_everything_is_put_back_after_the_run(tight: int) -> None:
    module = trained(Blocks(), MemoryLimit(tight), ladder())
    assert all("forward" not in vars(block) for block in module.blocks)
    (optimizer,) = module.trainer.optimizers
    assert absent_bytes(optimizer) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_what_still_does_not_fit_ends_with_an_explanation(tight: int) -> None:
    module = Blocks()
    with pytest.raises(torch.OutOfMemoryError, match="The largest tensors") as failure:
        trained(module, MemoryLimit(tight // 2), ladder())
    message = str(failure.value)
    assert f"even with {RECOMPUTED}, with {INPUTS}." in message
    assert "No offloading of optimizer states: AdamW has no plain states of 64 KiB or more" in message
    assert not module.recomputed


def test_a_cpu_without_a_simulated_device_has_one_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="No offloading of block inputs: host memory is the device's own"):
        trained(Failing(RUNGS[2]), ladder())


def test_a_rung_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="`last_resort='swap'` is unknown. Choose from none, recompute, offload."):
        MicroBatching(last_resort="swap")  # type: ignore[arg-type]


# --- together with the rest -----------------------------------------------------------------------------------------


class SeesRungs(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: Failing) -> None:
        assert [forward.inputs_on_host is not None for forward in pl_module.recomputed] == [True] * NUM_BLOCKS
        assert absent_bytes(trainer.optimizers[0])


def test_all_ranks_take_the_rungs_that_one_needs(tmp_path: Path) -> None:
    callbacks = (MemoryLimit("1GiB"), ladder(), SeesRungs())
    one, other = fit_on_two_ranks(Failing(RUNGS[3], rank=1), tmp_path, *callbacks)
    assert difference(one[0], other[0]) == 0


class Reseeds(pl.Callback):
    """Lightning's checkpoints hold no random state."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)


class SavesAtTheEnd(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert absent_bytes(trainer.optimizers[0])
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_holds_the_states(tight: int, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    trained(Blocks(), MemoryLimit(tight), ladder(), Reseeds(), SavesAtTheEnd(path), max_epochs=1)
    ours, resumed = ladder(), Blocks()
    quiet_trainer(MemoryLimit(tight), ours, Reseeds()).fit(resumed, ckpt_path=path, weights_only=False)
    assert reasons(ours) == [f"from now on with {what}" for what in (RECOMPUTED, INPUTS, STATES)]
    assert difference(resumed, trained(Blocks(), MicroBatching(micro_batch_size=1), Reseeds())) == 0


# --- growing back ---------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "STEPS_BEFORE_GROWTH", 2)


@pytest.mark.nightly
@pytest.mark.usefixtures("impatient")
def test_rungs_are_given_up_one_by_one_when_the_shortage_has_passed() -> None:
    ours = ladder()
    module = Failing(lambda module: module.trainer.global_step == 1 and RUNGS[3](module), num_batches=9)
    trained(module, MemoryLimit("1GiB"), ours, max_epochs=1)
    assert reasons(ours) == [
        *(f"from now on with {what}" for what in (RECOMPUTED, INPUTS, STATES)),
        *(f"from now on without {what}" for what in (STATES, INPUTS, RECOMPUTED)),
    ]
    assert [step for step, *_ in ours.changes] == [0, 1, 1, 1, 2, 4, 6]
    assert difference(module, trained(Blocks(num_batches=9), MicroBatching(micro_batch_size=1), max_epochs=1)) == 0


class Present(torch.optim.AdamW):
    """AdamW that can't step with states in host memory, as no optimizer can where that is other memory."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        assert not absent_bytes(self)
        return super().step(lambda: loss)


@pytest.mark.nightly
def test_states_that_leave_in_the_midst_of_a_step_are_there_when_it_needs_them(monkeypatch: Any) -> None:
    module = Failing(RUNGS[3])
    monkeypatch.setattr(module, "configure_optimizers", lambda: Present(module.parameters(), lr=1e-3))
    trained(module, MemoryLimit("1GiB"), ladder(), max_epochs=2)
    assert difference(module, trained(Blocks(), MicroBatching(micro_batch_size=1), max_epochs=2)) == 0


class SeesNoRung(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: Failing) -> None:
        assert not pl_module.recomputed
        assert not absent_bytes(trainer.optimizers[0])


class Impatient(pl.Callback):
    """As the fixture, in the process of a rank."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        backoff.STEPS_BEFORE_GROWTH = 2


@pytest.mark.nightly
def test_all_ranks_give_rungs_up_together(tmp_path: Path) -> None:
    module = Failing(lambda module: module.trainer.global_step == 1 and RUNGS[3](module), rank=1, num_batches=9)
    callbacks = (Impatient(), MemoryLimit("1GiB"), ladder(), SeesNoRung())
    one, other = fit_on_two_ranks(module, tmp_path, *callbacks, max_epochs=1)
    assert difference(one[0], other[0]) == 0


@pytest.mark.nightly
@pytest.mark.usefixtures("impatient")
def test_a_rung_that_is_still_needed_comes_back_and_is_tried_half_as_often() -> None:
    ours = ladder()
    module = Failing(RUNGS[3], num_batches=16)
    trained(module, MemoryLimit("1GiB"), ours, max_epochs=1)
    assert reasons(ours)[3:] == [f"from now on with{out} {STATES}" for out in ("out", "", "out", "", "out", "")]
    assert [step for step, *_ in ours.changes][4:] == [2, 3, 6, 7, 14, 15]
    assert difference(module, trained(Blocks(num_batches=16), MicroBatching(micro_batch_size=1), max_epochs=1)) == 0


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_states_and_inputs_leave_the_device() -> None:
    weights, peaks = [], []
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    for number, lacks in enumerate(RUNGS):
        ours, device, module = ladder(), PeakOnCuda(), Failing(lacks)
        pl.seed_everything(3)
        pl.Trainer(accelerator="gpu", devices=1, max_epochs=2, callbacks=[ours, device], **quiet).fit(module)
        assert len(reasons(ours)) == number
        weights.append([parameter.detach().cpu() for parameter in module.parameters()])
        peaks.append(device.peak_bytes)
    assert all(difference(one, weights[0]) == 0 for one in weights[1:])
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] - peaks[3] >= 2 * NUM_BLOCKS * 2 * 4 * WIDTH * WIDTH * 4


class PeakOnCuda(pl.Callback):
    """The peak of forward and backward of the last batch."""

    peak_bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.peak_bytes = torch.cuda.max_memory_allocated()
