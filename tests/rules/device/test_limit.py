"""The callback limits every stage, always leaves the mode, and explains a hopeless limit."""

import gc
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memfit.device import limit as limit_module
from lightning_memfit.device.limit import MemoryLimit, SimulatedDevice
from lightning_memfit.memory import GIB, MIB, Category
from lightning_memfit.memory.kind import DeviceKind
from tests.helpers.modules import Layers
from tests.helpers.trainers import quiet_trainer


class Regression(Layers):
    def __init__(self, batch_size=8, width=64):
        super().__init__(32, width, 1)
        self.batch_size = batch_size

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def _loader(self):
        generator = torch.Generator().manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(4 * self.batch_size, 32, generator=generator))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def trainer(tmp_path, *callbacks, max_epochs=1, **options):
    return quiet_trainer(*callbacks, default_root_dir=tmp_path, max_epochs=max_epochs, **options)


def no_mode_is_left():
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_fit_is_counted_by_category(tmp_path):
    limit, module = MemoryLimit("1MiB"), Regression()
    trainer(tmp_path, limit).fit(module)
    weights = sum(-(-p.nbytes // 512) * 512 for p in module.parameters())
    peak = limit.ledger.peak_by_category
    assert peak[Category.PARAMETER] == peak[Category.GRADIENT] == weights
    assert peak[Category.OPTIMIZER_STATE] == 2 * weights + 4 * 512
    assert peak[Category.INPUT] == 8 * 32 * 4
    assert no_mode_is_left()


def test_the_limit_changes_no_number(tmp_path):
    torch.manual_seed(0)
    plain = Regression()
    limited = Regression()
    limited.load_state_dict(plain.state_dict())
    trainer(tmp_path).fit(plain)
    trainer(tmp_path, MemoryLimit("1MiB")).fit(limited)
    for a, b in zip(plain.parameters(), limited.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_every_stage_runs_out_of_memory_and_recovers(tmp_path, stage):
    module = Regression(batch_size=4096)
    limit = MemoryLimit(1 * MIB)
    run = trainer(tmp_path, limit)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        getattr(run, stage)(module)
    assert no_mode_is_left()
    assert limit.ledger.num_ooms == 1
    assert not [name for name, value in vars(run.strategy).items() if callable(value) and name.endswith("_step")]
    module.batch_size = 8
    getattr(trainer(tmp_path, limit), stage)(module)
    assert limit.ledger.num_ooms == 0


def test_restored_optimizer_states_count(tmp_path):
    module = Regression()
    first = trainer(tmp_path)
    first.fit(module)
    first.save_checkpoint(tmp_path / "a.ckpt")

    class States(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.seen = limit.ledger.live_by_category[Category.OPTIMIZER_STATE]

    limit, states = MemoryLimit("1MiB"), States()
    trainer(tmp_path, limit, states, max_epochs=2).fit(module, ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert states.seen == limit.ledger.peak_by_category[Category.OPTIMIZER_STATE] > 0


def test_a_limit_below_the_weights_is_explained(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"`limit=1.00 KiB` is smaller .*Raise it"):
        trainer(tmp_path, MemoryLimit("1KiB")).fit(Regression())
    assert no_mode_is_left()


def test_a_limit_must_be_a_size():
    with pytest.raises(ValueError, match="`limit='a lot'`"):
        MemoryLimit("a lot")


@pytest.fixture
def cpu_as_cuda(monkeypatch):
    """The CPU in the role of a CUDA device of 80 GiB; returns its memory fraction and all that it was set to."""
    card = SimpleNamespace(fraction=1.0, set_to=[])

    def set_fraction(fraction, device=None):
        assert 0 <= fraction <= 1
        card.set_to.append(fraction)
        card.fraction = fraction

    monkeypatch.setattr(limit_module, "DeviceKind", SimpleNamespace(of=lambda device: DeviceKind.of("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: card.fraction)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    return card


class FailsEarly(Regression):
    """Its first `configure_model` fails, before the weights are moved."""

    is_mended = False

    def configure_model(self):
        if not self.is_mended:
            raise ValueError("a mistake of the user's")


def test_on_cuda_a_run_that_ends_before_the_weights_are_moved_leaves_nothing(tmp_path, cpu_as_cuda):
    module, run = FailsEarly(), trainer(tmp_path, MemoryLimit("4GiB"))
    for _ in range(2):
        with pytest.raises(ValueError, match="a mistake of the user's"):
            run.fit(module)
        assert cpu_as_cuda.fraction == 1
    module.is_mended = True
    run.fit(module)
    assert cpu_as_cuda.set_to == [0.05, 1.0] * 3


def test_on_cuda_an_allocator_that_knows_no_limit_gets_the_whole_card_back(tmp_path, cpu_as_cuda):
    cpu_as_cuda.fraction = 2.0**64 / (80 * GIB)  # what cudaMallocAsync says
    trainer(tmp_path, MemoryLimit("4GiB")).fit(Regression())
    assert cpu_as_cuda.set_to == [0.05, 1.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_limited_and_restored(tmp_path):
    before = torch.cuda.get_per_process_memory_fraction()
    module = Regression(batch_size=1 << 20)
    run = trainer(tmp_path, MemoryLimit("256MiB"), accelerator="gpu", devices=1)
    with pytest.raises(torch.OutOfMemoryError):
        run.fit(module)
    assert torch.cuda.get_per_process_memory_fraction() == before
    with pytest.raises(ValueError, match="is more than"):
        trainer(tmp_path, MemoryLimit("4TiB"), accelerator="gpu", devices=1).fit(Regression())


# Errors like CUDA's at the right byte, and exact figures afterwards.


KIB = 1024


def test_the_limit_holds_to_the_byte():
    with SimulatedDevice(4 * KIB) as device:
        kept = torch.empty(4 * KIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, dtype=torch.uint8)
        del kept
        torch.empty(4 * KIB, dtype=torch.uint8)
    assert (device.num_ooms, device.peak_bytes, device.live_bytes) == (1, 4 * KIB, 0)


def test_the_error_reads_like_cudas():
    from lightning.pytorch.utilities.memory import is_oom_error

    with SimulatedDevice("12MiB") as device:
        device.track(torch.empty(MIB), Category.PARAMETER)
        weight = torch.empty(MIB)
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            torch.empty(3 * MIB)
        assert weight is not None
    assert is_oom_error(caught.value)
    message = str(caught.value)
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has a total capacity of 12.00 MiB"
    )
    assert "8.00 MiB is free (simulated)" in message
    assert "activation 4.00 MiB" in message


def test_the_refused_output_is_released_while_the_error_is_alive():
    with SimulatedDevice(64 * MIB) as device:
        a = torch.zeros(4 * MIB)
        used = device.live_bytes
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.cat([a] * 8)
        assert caught.value.__traceback__ is not None
        assert device.live_bytes == used == sum(device.live_by_category.values())
        assert device.peak_bytes == used == sum(device.peak_by_category.values())
        b = a + 1
        assert device.live_bytes == 2 * used
        del a, b, caught  # its traceback holds the arguments
    assert device.live_bytes == device.num_ooms - 1 == 0


def test_training_recovers_from_an_error_with_exact_figures():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    device = SimulatedDevice(1 * MIB)
    device.track_module(model)
    device.track_optimizer(optimizer)
    weights = device.live_bytes
    with device:
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.zeros(4096, 64)).sum().backward()
        gc.collect()
        assert device.live_bytes == weights
        model(torch.zeros(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
    states = device.live_by_category[Category.OPTIMIZER_STATE]
    assert device.live_bytes == weights + states
    assert states == 2 * weights + 4 * 512
