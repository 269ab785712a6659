"""Resuming a run with another optimizer technique than the one its checkpoint was written with."""

import copy
import itertools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from lightning_memfit.techniques.optimizer import ReplaceOptimizer
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.helpers.trainers import quiet_trainer

BATCHES_PER_EPOCH = 4
LION = {"name": "bitsandbytes.Lion", "options": {"betas": [0.9, 0.99]}, "drop": ["eps"]}
ADAFACTOR = {"name": "torch.Adafactor", "options": {"eps": [None, 1e-3]}, "drop": ["betas"]}


def adamw(parameters, **kwargs):
    return torch.optim.AdamW(parameters, lr=1e-2, **kwargs)


class Regression(pl.LightningModule):
    """Keeps its optimizer, and a learning rate schedule of it."""

    def __init__(self, make=adamw, schedule=True):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
        self.make, self.schedule = make, schedule
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        self.opt = self.make(self.parameters())
        if not self.schedule:
            return self.opt
        schedule = lr_scheduler.ExponentialLR(self.opt, 0.9)
        return {"optimizer": self.opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * BATCHES_PER_EPOCH, 64, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :8].sin()), batch_size=8)


def run(callbacks=(), max_epochs=2, ckpt_path=None, make=adamw, module=None, fit=None, **kwargs):
    pl.seed_everything(0, verbose=False)
    module = Regression(make) if module is None else module() if isinstance(module, type) else module
    trainer = quiet_trainer(*callbacks, max_epochs=max_epochs, max_steps=-1, **kwargs)
    trainer.fit(module, data(), ckpt_path=ckpt_path, **(fit or {}))
    module.ran = trainer
    return module


def saved(path, callbacks=(), **kwargs):
    run(callbacks, max_epochs=1, **kwargs).ran.save_checkpoint(path)
    return path


def weights(module):
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def distance(module, reference, start):
    """How far two runs are apart, as a part of the way that the reference has gone from `start`."""
    return ((weights(module) - weights(reference)).norm() / (weights(reference) - start).norm()).item()


EIGHT_BIT = {"8-bit": [Optimizer8bit()], "all in 8 bits": [Optimizer8bit(min_8bit_size=0)]}
WAYS = {
    "plain": [],
    "fused": [ReplaceOptimizer("torch.AdamW", {"fused": True})],
    "torch": [ReplaceOptimizer("torch.AdamW")],
    "paged": [Optimizer8bit(paged=True, bits=32)],
    **EIGHT_BIT,
}
INTO = {name: way for name, way in WAYS.items() if name != "plain"}
EXACT = {"plain", "fused", "torch", "paged"}


def used(name):
    return copy.deepcopy(WAYS[name])


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize(("first", "second"), [pair for pair in itertools.product(WAYS, INTO) if pair[0] != pair[1]])
def test_states_of_one_family_go_on(tmp_path, first, second):
    reference, start = run(), weights(run(max_epochs=1))
    resumed = run(used(second), ckpt_path=saved(tmp_path / "half.ckpt", used(first)))
    if {first, second} <= EXACT:
        torch.testing.assert_close(weights(resumed), weights(reference), rtol=0, atol=1e-6)
    else:
        assert distance(resumed, reference, start) < 0.05  # over 0.3 if the states were lost
    assert resumed.ran.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9 ** (2 * BATCHES_PER_EPOCH))
    assert resumed.opt is resumed.ran.optimizers[0]


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", WAYS)
def test_resume_is_bitwise_and_needs_no_pickles(tmp_path, name):
    straight = run(used(name))
    path = saved(tmp_path / "half.ckpt", used(name))
    resumed = run(used(name), ckpt_path=path, fit={"weights_only": True})
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize("name", ["fused", "torch"])
def test_plain_lightning_resumes_what_has_32_bit_states(tmp_path, name):
    resumed = run(ckpt_path=saved(tmp_path / "half.ckpt", used(name)))
    torch.testing.assert_close(weights(resumed), weights(run()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_plain_lightning_fails_at_8_bit_states_before_a_weight_changes(tmp_path, name):
    """Nothing of ours is there to say why, but a run must not go on with states that it has lost."""
    make = {**MAKE, "AdamW": adamw}[name]
    path = saved(tmp_path / "8.ckpt", [Optimizer8bit()], make=make)
    module = Regression(make)
    with pytest.raises((KeyError, AttributeError, TypeError)):
        run(ckpt_path=path, module=module)
    assert torch.equal(module.state_dict()["net.0.weight"], torch.load(path)["state_dict"]["net.0.weight"])


REFUSED = {
    "Lion after Adam": ([], [ReplaceOptimizer(**LION)], r"are of Adam and.*as those of Lion \(bitsandbytes.Lion\)"),
    "Lion after 8-bit Adam": (
        [Optimizer8bit()],
        [ReplaceOptimizer(**LION)],
        r"of Adam \(torch.AdamW\), written with Optimizer8bit\(\),.*those of Lion.*Resume with Optimizer8bit",
    ),
    "8-bit Lion after Adam": (
        [],
        [ReplaceOptimizer(**LION), Optimizer8bit()],
        r"of Adam.*those of Lion \(bitsandbytes.Lion\)",
    ),
    "Adam after Lion": ([ReplaceOptimizer(**LION)], [Optimizer8bit()], r"Resume with ReplaceOptimizer\('bitsandbytes"),
    "Adam after 8-bit Lion": (
        [ReplaceOptimizer(**LION), Optimizer8bit()],
        [Optimizer8bit()],
        r"Resume with ReplaceOptimizer\('bitsandbytes.Lion', .* and Optimizer8bit\(\), or",
    ),
    "Adafactor after Adam": ([], [ReplaceOptimizer(**ADAFACTOR)], "those of torch.Adafactor"),
    "Adafactor after 8-bit Adam": (
        [Optimizer8bit()],
        [ReplaceOptimizer(**ADAFACTOR)],
        "those of torch.Adafactor",
    ),
    "Adam after Adafactor": ([ReplaceOptimizer(**ADAFACTOR)], [Optimizer8bit()], r"ReplaceOptimizer\('torch.Adaf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_states_of_another_family_are_refused(tmp_path, name):
    first, second, message = REFUSED[name]
    path = saved(tmp_path / "half.ckpt", copy.deepcopy(first))
    module = Regression()
    with pytest.raises(ValueError, match=message):
        run(copy.deepcopy(second), ckpt_path=path, module=module)
    assert module.losses == []  # nothing was trained


MAKE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
}


@pytest.mark.parametrize("name", MAKE)
def test_other_families_go_on_in_8_bits_and_back(tmp_path, name):
    make = MAKE[name]
    reference, start = run(make=make), weights(run(make=make, max_epochs=1))
    there = run([Optimizer8bit()], make=make, ckpt_path=saved(tmp_path / "32.ckpt", make=make))
    assert distance(there, reference, start) < 0.1
    path = saved(tmp_path / "8.ckpt", [Optimizer8bit()], make=make)
    back = run([ReplaceOptimizer(f"torch.{name}")], make=make, ckpt_path=path)
    assert type(back.opt) is getattr(torch.optim, name)
    assert distance(back, reference, start) < 0.1


HALF = {"precision": "bf16-true"}
OURS = {
    **{name: (INTO[name], {}) for name in INTO},
    "adafactor": ([ReplaceOptimizer(**ADAFACTOR)], {}),
    "host": ([HostMasterWeights()], HALF),
    "stochastic": ([StochasticRounding()], HALF),
    "rounded 8-bit": ([Optimizer8bit(), StochasticRounding()], HALF),
}


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", OURS)
def test_states_of_parameters_in_another_order_are_refused(tmp_path, name):
    """torch's fused kernel would write beyond the end of the states."""
    callbacks, trainer = copy.deepcopy(OURS[name])
    own = "Rounding" in str(callbacks) or name == "adafactor"  # these go on from themselves only
    path = saved(
        tmp_path / "c.ckpt", callbacks if own else (), make=lambda p: adamw(list(p)[::-1]), **(trainer if own else {})
    )
    module = Regression()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0,? has shape.*\(96, 64\)"):
        run(copy.deepcopy(OURS[name][0]), ckpt_path=path, module=module, **trainer)
    assert module.losses == []


def test_a_kept_optimizer_is_the_one_that_trains():
    class StopsAfterTwo(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 2:
                self.opt.param_groups[0]["lr"] = 0.0
                self.at_two = weights(self)

    for callbacks in (*INTO.values(), [ReplaceOptimizer(**ADAFACTOR)], [ReplaceOptimizer(**LION)]):
        module = StopsAfterTwo(schedule=False)
        run(copy.deepcopy(callbacks), module=module, max_epochs=1)
        assert torch.equal(weights(module), module.at_two), callbacks


def test_an_optimizer_made_in_the_constructor_goes_on_in_a_second_fit():
    class Kept(Regression):
        def __init__(self):
            super().__init__()
            self.only = adamw(self.parameters())

        def configure_optimizers(self):
            return self.only

    for callbacks in ([Optimizer8bit()], [ReplaceOptimizer(**LION), Optimizer8bit()], WAYS["fused"]):
        module = run(copy.deepcopy(callbacks), module=Kept(), max_epochs=1)
        state = module.only.state[module.net[0].weight]
        steps = int(state["step"])
        run(copy.deepcopy(callbacks), module=module, max_epochs=1)
        assert module.only is module.ran.optimizers[0]
        assert module.only.state[module.net[0].weight] is state
        assert state["step"] == 2 * steps


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-2)


@pytest.mark.parametrize("name", ["8-bit", "fused", "torch", "all in 8 bits"])
def test_parameters_unfrozen_later(tmp_path, name):
    def make(parameters):
        return adamw([p for p in parameters if p.requires_grad])

    reference = run([Unfreeze()], make=make, max_epochs=3)
    start = weights(run([Unfreeze()], make=make, max_epochs=1))
    ours = run([Unfreeze(), *used(name)], make=make, max_epochs=3)
    assert distance(ours, reference, start) < (1e-5 if name in EXACT else 0.05)

    # Lightning itself leaves them frozen after a resume, so that a resumed plain run is what to compare with.
    def resumed(*callbacks):
        path = tmp_path / f"{len(callbacks)}.ckpt"
        run([Unfreeze(), *callbacks], make=make, max_epochs=2).ran.save_checkpoint(path)
        return run([Unfreeze(), *copy.deepcopy(callbacks)], make=make, max_epochs=3, ckpt_path=path)

    assert distance(resumed(*used(name)), resumed(), start) < (1e-5 if name in EXACT else 0.05)


def test_hyper_parameters_set_later():
    class Sets(Regression):
        def __init__(self, key, value):
            super().__init__()
            self.key, self.value = key, value

        def on_train_batch_start(self, batch, batch_idx):
            self.before = weights(self)
            self.opt.param_groups[0][self.key] = self.value

    for callbacks, key, value in (
        ([Optimizer8bit()], "amsgrad", True),
        ([Optimizer8bit()], "maximize", True),
        ([Optimizer8bit()], "lr", torch.tensor(0.1)),
    ):
        module = Sets(key, value)
        with pytest.raises(ValueError, match=key):
            run(callbacks, module=module)
        assert torch.equal(weights(module), module.before)


class Sparse(Regression):
    def __init__(self, make=adamw):
        super().__init__(make)
        self.embedding = nn.Embedding(128, 64, sparse=True)

    def training_step(self, batch, batch_idx):
        ids = (batch[0][:, :4] * 30).long().clamp(-60, 60) + 60
        return nn.functional.mse_loss(self.net(self.embedding(ids).sum(1)), batch[1])


SPARSE = {
    "8-bit": Optimizer8bit(),
    "lion": ReplaceOptimizer(**LION),
    "torch": ReplaceOptimizer("torch.AdamW"),
    "fused": ReplaceOptimizer("torch.AdamW", {"fused": True}),
    "adafactor": ReplaceOptimizer(**ADAFACTOR),
}


@pytest.mark.parametrize("callback", SPARSE.values(), ids=SPARSE)
def test_sparse_gradients_are_refused_before_a_weight_changes(callback):
    pl.seed_everything(0, verbose=False)
    module = Sparse(MAKE["SGD"] if isinstance(callback, Optimizer8bit) else adamw)
    before = weights(module)
    with pytest.raises((ValueError, RuntimeError), match="sparse gradient"):  # torch's own for its classes
        run([callback], module=module)
    assert torch.equal(weights(module), before)
