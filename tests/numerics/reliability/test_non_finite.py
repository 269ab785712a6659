"""Steps whose gradients are no numbers change nothing, on all ranks, and end the run if they don't stop."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from cli.main import main
from lightning_memfit import GradientRelease, MicroBatching, NonFiniteGuard, strategies
from tests.fuzz import RECIPE
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import quiet_trainer


class Breaks(LightningModule):
    """Has a loss that is no number in some steps, on some ranks."""

    def __init__(self, steps, rank=0):
        super().__init__()
        self.steps, self.rank = steps, rank
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        output = self.last(self.first(batch)).square().mean()
        return output * (float("nan") if batch_idx in self.steps and self.global_rank == self.rank else 1.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def train(module, *callbacks, **options):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    trainer = quiet_trainer(*callbacks, max_epochs=1, **options)
    trainer.fit(module, DataLoader(data, batch_size=4))
    return torch.cat([whole(parameter).flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("more", [(), (MicroBatching(micro_batch_size=2),)])
def test_a_step_is_left_out(more):
    guard = NonFiniteGuard()
    with pytest.warns(UserWarning, match=r"step 3: gradients are not finite, first in parameter order `first.weight`"):
        weights = train(Breaks({3}), *more, guard)
    assert guard.skipped == [3]
    assert weights.isfinite().all()
    assert not train(Breaks({3}), *more).isfinite().all()  # without it all is lost


class Normalised(Breaks):
    """Has running statistics of two kinds: torch's, and a buffer that is another tensor after every batch."""

    def __init__(self, steps=(), rank=0):
        super().__init__(steps, rank)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("floor", torch.full((4,), -torch.inf))

    def training_step(self, batch, batch_idx):
        if batch_idx in self.steps and self.global_rank == self.rank:
            batch = batch * float("nan")
        self.ema = 0.9 * self.ema + 0.1 * batch.mean(0)
        return self.last(self.norm(self.first(batch))).square().mean()


@pytest.mark.parametrize("window", [1, 2])
def test_buffers_are_put_back_with_the_step(window):
    """All is as if the batches of the step that was left out had never been."""
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    states = []
    for broken in [(3,), ()]:
        torch.manual_seed(0)
        module = Normalised(broken)
        rows = data if broken else torch.cat([data[: (4 - window) * 4], data[16:]])
        trainer = quiet_trainer(NonFiniteGuard(), max_epochs=1, accumulate_grad_batches=window)
        trainer.fit(module, DataLoader(rows, batch_size=4))
        states.append(module.state_dict())
    assert int(states[0]["norm.num_batches_tracked"]) == 8 - window
    torch.testing.assert_close(*states, rtol=0, atol=0)


class Adversaries(LightningModule):
    """Steps a generator after its discriminator, whose gradients break; those of the generator may be there before."""

    def __init__(self, steps, are_there_before):
        super().__init__()
        self.automatic_optimization = False
        self.steps, self.are_there_before, self.moved = steps, are_there_before, []
        self.generator, self.discriminator = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        if self.are_there_before:
            self.manual_backward(self.generator(batch).mean())
        self.manual_backward(self.discriminator(batch).mean() * (torch.nan if batch_idx in self.steps else 1.0))
        second.step()
        if not self.are_there_before:
            self.manual_backward(self.generator(batch).mean())
        before = self.generator.weight.detach().clone()
        first.step()
        self.moved.append(not torch.equal(before, self.generator.weight))

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


@pytest.mark.parametrize("are_there_before", [True, False])
def test_an_optimizer_loses_its_own_gradients_only(are_there_before):
    module, guard = Adversaries({3}, are_there_before), NonFiniteGuard()
    with pytest.warns(UserWarning, match="first in parameter order `discriminator.weight`"):
        train(module, guard)
    assert module.moved == [True] * 8
    assert len(guard.skipped) == 1
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_each_optimizer_has_its_own_patience(tmp_path):
    """The steps of the other one, which are made, don't end the row."""
    with pytest.raises(RuntimeError, match=r"`discriminator.weight`, 3 steps in a row"):
        train(Adversaries({2, 3, 4, 5}, False), NonFiniteGuard(patience=3, dirpath=str(tmp_path)))


def test_several_in_a_row_end_the_run(tmp_path):
    guard = NonFiniteGuard(patience=3, dirpath=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"3 steps in a row.*last good step are in .*non-finite-step=4.ckpt"):
        train(Breaks(set(range(2, 8))), guard)
    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


def test_half_precision_with_a_scaler():
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    guard = NonFiniteGuard(patience=1)
    assert train(Breaks({2}), guard, plugins=[scaled]).isfinite().all()
    assert guard.skipped[-1:] == [2]


class Fused(Breaks):
    """Has an optimizer that unscales gradients within its kernel, after the guard has seen them."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5, fused=True)


@pytest.mark.parametrize("more", [(), (MicroBatching(micro_batch_size=2),)], ids=["whole", "micro-batches"])
def test_a_scaler_sees_what_an_optimizer_unscales_itself(more):
    """The scale is lowered and the step left out, as without the guard."""
    found = []
    for guards in [(), (NonFiniteGuard(),)]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        weights = train(Fused({2, 5}), *more, *guards, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
        found.append((weights, scaler.get_scale(), [guard.skipped for guard in guards]))
    (plain, scale, _), (guarded, same_scale, skipped) = found
    assert skipped == [[2, 5]]
    assert scale == same_scale == 2.0**8
    assert guarded.isfinite().all()
    torch.testing.assert_close(guarded, plain, rtol=0, atol=0)


class SpoiltOnOneRank(Fused):
    """Spoils gradients of rank 1 after they were reduced."""

    def on_after_backward(self):
        if self.trainer.global_step == 3 and self.global_rank == 1:
            self.first.weight.grad.fill_(torch.inf)


def with_scaler_on_two():
    scaler, guard, module = torch.amp.GradScaler("cpu", init_scale=2.0**10), NonFiniteGuard(), SpoiltOnOneRank(())
    weights = train(
        module, guard, devices=2, strategy="ddp", plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    )
    return guard.skipped, scaler.get_scale(), weights.tolist()


def test_scalers_of_all_ranks_leave_out_the_step_of_one(tmp_path):
    first, second = run_ranks(with_scaler_on_two, 2, tmp_path)
    assert first.result, first.output[-5000:]
    assert first.result == second.result
    assert first.result[:2] == ([3], 2.0**9)


STRATEGIES = {
    "ddp": ("DataParallelStrategy", {"process_group_backend": "gloo"}),
    "fsdp2": ("FullyShardedStrategy", {"process_group_backend": "gloo"}),
    "zero_1": ("ZeroStrategy", {"stage": 1}),
    "zero_2": ("ZeroStrategy", {"stage": 2}),
    "zero_2 on the host": ("ZeroStrategy", {"stage": 2, "offload_optimizer": True}),
    "zero_3": ("ZeroStrategy", {"stage": 3}),
}


def on_two(names, window):
    """What each strategy skipped, and the weights: batch 2 of rank 1 has no number."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank, found = os.environ["RANK"], {}
    for name in names:
        kind, settings = STRATEGIES[name]
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", NODE_RANK="0")
        guard = NonFiniteGuard()
        strategy = getattr(strategies, kind)(**settings)
        options = {"devices": 2, "strategy": strategy, "accumulate_grad_batches": window}
        module = Breaks({2}, rank=1)
        weights = train(module, guard, **options).tolist()
        norm = Normalised({2}, rank=1)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", NODE_RANK="0")
        train(norm, NonFiniteGuard(), **options | {"strategy": getattr(strategies, kind)(**settings)})
        are_finite = all(bool(buffer.isfinite().all()) for name, buffer in norm.named_buffers() if name != "floor")
        found[name] = guard.skipped, weights, are_finite
    return found


def whole(parameter):
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


@pytest.mark.nightly_cases("1")
@pytest.mark.parametrize("window", [1, 2])
def test_ranks_agree(window, tmp_path):
    names = [*STRATEGIES] if window == 1 else ["ddp", "fsdp2", "zero_2", "zero_3"]
    if not find_spec("deepspeed"):
        names = names[:2]
    first, second = run_ranks(on_two, 2, tmp_path, names, window, seconds=200)
    assert first.result, first.output[-5000:]
    assert first.result == second.result
    skipped, expected, _ = first.result["ddp"]
    assert skipped == [2 // window]
    for name, (also, weights, are_finite) in first.result.items():
        assert are_finite, name
        assert also == skipped, name
        assert weights == pytest.approx(expected, abs=1e-6), name


def test_losses_are_watched_where_gradients_are_gone(tmp_path):
    guard = NonFiniteGuard(patience=2)
    with pytest.raises(RuntimeError, match=r"step 3: the loss is not finite, 2 steps in a row. Lower[^.]*.$"):
        train(Breaks({2}), GradientRelease(), guard)
    assert guard.skipped == []


def test_sparse_gradients_are_looked_at():
    class Embeds(LightningModule):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(8, 2, sparse=True)

        def training_step(self, batch, batch_idx):
            factor = torch.nan if batch_idx == 1 else 1.0
            return (self.table(torch.tensor([1, 1, 3])) * factor).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    guard, module = NonFiniteGuard(), Embeds()
    quiet_trainer(guard, max_steps=3, limit_val_batches=0).fit(module, torch.utils.data.DataLoader(range(3)))
    assert guard.skipped == [1]
    assert module.table.weight.isfinite().all()


def test_the_command_has_one_unless_it_is_told(tmp_path, monkeypatch, capsys):
    """Without one the run would go on to its end with weights that are no numbers."""
    (tmp_path / "spoils.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Spoils(Callback):\n"
        "    def on_after_backward(self, trainer, module):\n"
        "        if trainer.global_step: next(module.parameters()).grad.fill_(float('nan'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    callbacks = [{"class_path": "spoils.Spoils"}]
    trainer = {**RECIPE["trainer"], "callbacks": callbacks, "max_steps": 8}
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "trainer": trainer}))
    assert main(["fit", "--config", "recipe.yaml"]) == 1
    assert "step 5: gradients are not finite, first in parameter order" in capsys.readouterr().err
    (path,) = tmp_path.rglob("non-finite-step=5.ckpt")
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())
    callbacks.append({"class_path": "NonFiniteGuard", "init_args": {"patience": None}})
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "trainer": trainer}))
    assert main(["fit", "--config", "recipe.yaml"]) == 0
