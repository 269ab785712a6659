"""A run goes on from a checkpoint between accumulation windows as if nothing had been; others say what they lack."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import AtomicCheckpointIO, MicroBatching, WholeSteps, strategies
from lightning_memfit.data.batched import EffectiveBatchSampler, ResumableLoader
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer

WINDOW = 4
DATA = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(1)))
VALIDATION = {"val_check_interval": WINDOW, "limit_val_batches": 1}


class Learns(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sin().square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def train(*callbacks, path=None, ranks=(1, 0), **options):
    torch.manual_seed(0)
    module = Learns()
    loader = ResumableLoader(DATA, EffectiveBatchSampler(DATA, 2, WINDOW, *ranks, seed=7))
    options = {"max_epochs": 2, "accumulate_grad_batches": WINDOW, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(*callbacks, **({"limit_val_batches": 0} | options))
    if "strategy" not in options:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    trainer.fit(module, loader, DataLoader(DATA, batch_size=4), ckpt_path=path)
    return torch.cat([_whole(parameter).flatten() for parameter in module.parameters()])


def _whole(parameter):
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).clone()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach().clone()


def saves(folder, **when):
    return ModelCheckpoint(folder, "{step}-{epoch}", save_top_k=-1, **when)


CASES = {
    "at steps": ({"every_n_train_steps": 1}, {}),
    "at a validation": ({}, VALIDATION),
    "the best of a validation": ({"monitor": "val_loss"}, VALIDATION),
    "at the end of an epoch": ({"save_on_train_epoch_end": True}, {"limit_train_batches": 7}),
}


@pytest.mark.nightly_cases("at steps-Lightning", "the best of")
@pytest.mark.nightly_cases("at a validation-")
@pytest.mark.parametrize("more", [[WholeSteps], [MicroBatching]], ids=["Lightning's windows", "MicroBatching"])
@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_goes_on_exactly(case, more, tmp_path):
    when, options = CASES[case]
    options = {**options, "enable_checkpointing": True}
    made = [kind(micro_batch_size=1) if kind is MicroBatching else kind() for kind in more]
    whole = train(*made, saves(tmp_path, **when), **options)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) > 1
    for path in paths:
        progress = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        assert progress["ready"] % WINDOW == 0 or progress["ready"] == options.get("limit_train_batches")
        again = [kind(micro_batch_size=1) if kind is MicroBatching else kind() for kind in more]
        resumed = train(*again, saves(tmp_path / "resumed", **when), path=path, **options)
        assert torch.equal(whole, resumed), path


def test_a_save_inside_a_window_warns(tmp_path, recwarn):
    """A validation every three batches is inside windows of four; it is said once."""
    options = {"val_check_interval": 3, "limit_val_batches": 1, "enable_checkpointing": True}
    train(WholeSteps(), saves(tmp_path), **options)
    (told,) = (str(one.message) for one in recwarn if "WholeSteps" in str(one.message))
    assert "was saved before the optimizer's step of batches 5 to 6 (epoch 0)" in told
    path = min(tmp_path.glob("*.ckpt"), key=lambda one: one.stat().st_mtime)
    train(WholeSteps(), path=path, **options)


def test_an_error_says_what_its_checkpoint_lacks(tmp_path):
    class Fails(Callback):
        def on_before_zero_grad(self, trainer, *_):
            if trainer.global_step == 2:
                raise RuntimeError("no more")

    saving = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_epochs=5)
    with pytest.raises(RuntimeError, match="no more"), pytest.warns(UserWarning, match="step of batch 9 "):
        train(WholeSteps(), Fails(), saving, enable_checkpointing=True)


STRATEGIES = {
    "fsdp2": ("FullyShardedStrategy", {"process_group_backend": "gloo"}),
    "zero_2": ("ZeroStrategy", {"stage": 2}),
    "zero_3": ("ZeroStrategy", {"stage": 3}),
}


def on_two(folder: Path, micro_batching: bool) -> dict[str, float]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    ranks, found = (2, int(os.environ["RANK"])), {}
    chosen = list(STRATEGIES)[:1] if micro_batching else list(STRATEGIES)  # ZeRO has no windows beside it
    for name in chosen:
        kind, options = STRATEGIES[name]

        def run(path=None, to="first", name=name, kind=kind, options=options):
            own = [MicroBatching(micro_batch_size=1)] if micro_batching else [WholeSteps()]
            strategy = getattr(strategies, kind)(**options)
            common = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
            save = saves(folder / name / to)
            return train(*own, save, path=path, ranks=ranks, enable_checkpointing=True, **common, **VALIDATION)

        _set_ranks(ranks[1])
        whole = run()
        paths = sorted((folder / name / "first").glob("*.ckpt"))
        assert len(paths) > 1
        for path in paths[:2]:
            _set_ranks(ranks[1])
            found[f"{name} {path.name}"] = float((run(path, f"again-{path.stem}") - whole).abs().max())
    return found


def _set_ranks(rank: int) -> None:
    """Lightning takes them away after a run."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", NODE_RANK="0")


@pytest.mark.nightly
@pytest.mark.parametrize("micro_batching", [False, True])
def test_under_strategies(micro_batching, tmp_path):
    pytest.importorskip("deepspeed")
    for ended in run_ranks(on_two, 2, tmp_path / "run", tmp_path / "saved", micro_batching, seconds=240):
        assert ended.code == 0, ended.output[-5000:]
        assert len(ended.result) == (2 if micro_batching else 6)
        assert set(ended.result.values()) == {0.0}, ended.result
