import copy
from contextlib import nullcontext
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from tests.contract.runs import LanguageModel, StepsOn, assert_same_weights, fit, loader, trainer
from tests.helpers.trainers import quiet_trainer

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def scheduled(module, **kwargs):
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-2, **kwargs)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.8)}}


def module(late=False):
    return LanguageModel(scheduled, late, **NO_DROPOUT)


class Bf16Forward(LanguageModel):
    """Float32 weights and optimizer; every forward pass computes with weights rounded to bfloat16."""

    def training_step(self, batch, batch_idx):
        names = dict(self.model.named_parameters())
        rounded = {name: p.to(torch.bfloat16) for name, p in names.items()}
        torch.set_default_dtype(torch.bfloat16)  # as Lightning does in bf16-true
        try:
            loss = torch.func.functional_call(self.model, rounded, kwargs={"input_ids": batch, "labels": batch}).loss
        finally:
            torch.set_default_dtype(torch.float32)
        self.losses.append(loss.detach().clone())
        return loss


class NoGradients(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert all(p.grad is None for p in pl_module.parameters())
        assert all(p.dtype is torch.bfloat16 for p in pl_module.parameters())
        pl_module.seen["none"] = True


@pytest.mark.parametrize("kwargs", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_numbers_of_float32_adamw_over_a_bfloat16_forward(kwargs):
    config = {**NO_DROPOUT, "tie_word_embeddings": False}
    plain = fit(module=lambda: Bf16Forward(partial(scheduled, fused=True), **config), **kwargs)
    ours = fit(
        [HostMasterWeights(), NoGradients()],
        lambda: LanguageModel(scheduled, **config),
        precision="bf16-true",
        **kwargs,
    )
    assert ours.seen["none"]
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert_same_weights(ours, plain)


def test_the_run_leaves_a_float32_module_as_it_was():
    plain, ours = (
        fit(module=module),
        fit([HostMasterWeights(), ActivationCheckpointing()], module, precision="bf16-true"),
    )
    assert vars(ours).keys() == vars(plain).keys()
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())
    ran = ours.seen["trainer"]
    assert "lightning_module_state_dict" not in vars(ran.strategy)
    assert [p for group in ran.optimizers[0].param_groups for p in group["params"]] != []
    assert all(p in set(ours.parameters()) for group in ran.optimizers[0].param_groups for p in group["params"])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("during", [False, True])
def test_resume_is_bitwise(tmp_path, late, during):
    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def run(callbacks=(), **kwargs):
        options = {"max_steps": -1, "limit_train_batches": 2, "precision": "bf16-true"}
        return fit([HostMasterWeights(), *callbacks], lambda: module(late), **options, **kwargs)

    straight = run([Save()] if during else [], max_epochs=3)
    path = tmp_path / "0.ckpt"
    if not during:
        run(max_epochs=1).seen["trainer"].save_checkpoint(path)
    weights = torch.load(path, weights_only=False)["state_dict"]
    assert all(value.dtype is torch.float32 for value in weights.values())
    resumed = run(max_epochs=3, ckpt_path=path)
    assert torch.equal(torch.stack(resumed.losses), torch.stack(straight.losses[2:]))
    assert_same_weights(resumed, straight)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("backward", "the module's `backward` may .* leave HostMasterWeights out"),
        ("on_after_backward", "the module's `on_after_backward` finds weights without gradients"),
        ("on_before_zero_grad", "the module's `on_before_zero_grad` finds"),
        ("optimizer_step", "the module's `optimizer_step` finds"),
        ("optimizer_zero_grad", "the module's `optimizer_zero_grad` finds"),
    ],
)
def test_hooks_that_would_miss_gradients_are_refused(hook, message):
    made = type("Looks", (LanguageModel,), {hook: lambda self, *args, **kwargs: norm_of(self)})()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(ValueError, match=message):
        trainer([HostMasterWeights()]).fit(made, loader())
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


# --- any module gives the numbers of a plain float32 run that rounds weights in its forward pass ----------------------


def make_net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


class Small(pl.LightningModule):
    """Trains a net with what `configure` returns, and keeps losses and gradient norms that hooks saw."""

    def __init__(self, configure, net=make_net):
        super().__init__()
        self.net = net()
        self.configure = configure
        self.losses, self.norms = [], []

    def output(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = self.output(batch).float().square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.output(batch).float().square().mean().detach())

    def test_step(self, batch, batch_idx):
        self.norms.append(float(self.output(batch).float().norm()))

    def configure_optimizers(self):
        return self.configure(self)


class Rounded(Small):
    """Float32 weights that each forward pass rounds to bfloat16, in plain Lightning."""

    def output(self, x):
        rounded = {name: p.to(torch.bfloat16) for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, rounded, (x.to(torch.bfloat16),))


def sgd(module, **kwargs):
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, "momentum": 0.9, **kwargs})


def data(n=6):
    return DataLoader(torch.randn(4 * n, 8, generator=torch.Generator().manual_seed(5)), batch_size=4)


def both(change=None, configure=sgd, net=make_net, callbacks=list, val=False, **options):
    """Run the plain reference and the technique. `change` makes a subclass of either."""
    runs = []
    for cls, ours, precision in ((Rounded, [], "32-true"), (Small, [HostMasterWeights()], "bf16-true")):
        pl.seed_everything(0, verbose=False)
        made = (change(cls) if change else cls)(configure, net)
        run = quiet_trainer(*ours, *callbacks(), precision=precision, **{"max_epochs": 2, **options})
        run.fit(made, data(), data(1) if val else None)
        made.run = run
        runs.append(made)
    return runs


def assert_same_run(plain, ours):
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert ours.norms == plain.norms
    assert_same_weights(ours, plain)
    assert ours.dtype is plain.dtype
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in plain.parameters()]


def norm_of(module):
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return float(torch.stack([g.double().norm() for g in gradients]).norm()) if gradients else 0.0


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_callbacks_and_modules_find_the_gradients_of_the_plain_run(options):
    class Norms(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, *args):
            pl_module.norms.append(norm_of(pl_module))

    def looks(cls):
        look = lambda self, *args: self.norms.append(norm_of(self))  # noqa: E731
        return type("Looks", (cls,), {"on_before_optimizer_step": look})

    plain, ours = both(looks, callbacks=lambda: [Norms()], **options)
    assert any(norm > 0 for norm in plain.norms)
    assert_same_run(plain, ours)


@pytest.mark.parametrize("how", ["parameters", "clip_gradients", "value", "each"])
def test_a_modules_own_clipping(how):
    def clips(cls):
        class Clips(cls):
            def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
                if how == "parameters":
                    nn.utils.clip_grad_norm_(self.parameters(), 0.05)
                elif how == "value":
                    nn.utils.clip_grad_value_(self.net.parameters(), 1e-3)
                elif how == "clip_gradients":
                    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                else:
                    for p in self.parameters():
                        p.grad = p.grad * 0.1

        return Clips

    plain, ours = both(clips)
    assert_same_run(plain, ours)
    assert not torch.equal(torch.stack(both()[0].losses), torch.stack(plain.losses))


class Unfreeze(BaseFinetuning):
    """Lightning's way: the optimizer gets the layer as a group of its own when it is unfrozen."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)


def trained_only(cls):
    def configure(module):
        return cls((p for p in module.parameters() if p.requires_grad), lr=1e-2)

    return configure


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("cls", [torch.optim.SGD, partial(torch.optim.AdamW, fused=True)], ids=["SGD", "AdamW"])
def test_layers_that_lightning_unfreezes_are_trained(cls, options):
    plain, ours = both(configure=trained_only(cls), callbacks=lambda: [Unfreeze()], max_epochs=3, **options)
    assert_same_run(plain, ours)
    assert not torch.equal(ours.net[0].weight, both(configure=trained_only(cls), max_epochs=3)[0].net[0].weight)


def test_freezing_and_unfreezing_what_the_optimizer_has():
    class Switch(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.net[0].requires_grad_(False)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.net[0].requires_grad_(trainer.global_step in (2, 3, 6))
            pl_module.net[4].requires_grad_(trainer.global_step not in (4, 5))

    def at_first(module):
        module.net[0].requires_grad_(False)
        return sgd(module, weight_decay=0.1)

    assert_same_run(*both(configure=at_first, callbacks=lambda: [Switch()]))


@pytest.mark.parametrize("how", ["setup_optimizers", "assigned", "groups"])
def test_optimizers_that_are_rebuilt_or_edited_during_training(how):
    class Rebuild(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                return
            if how == "setup_optimizers":
                trainer.strategy.setup_optimizers(trainer)
            elif how == "assigned":
                trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.02)]
            else:
                [group] = trainer.optimizers[0].param_groups
                group.update(lr=0.03, momentum=0.5, weight_decay=0.2)
                group["params"] = group["params"][2:]

    assert_same_run(*both(callbacks=lambda: [Rebuild()], max_epochs=3))


def test_lbfgs_trains():
    plain, ours = both(configure=lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4))
    assert plain.losses[-1] < plain.losses[0]
    assert_same_run(plain, ours)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EMAWeightAveraging(decay=0.7),
        lambda: WeightAveraging(),
        lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1),
    ],
    ids=["ema", "average", "swa"],
)
def test_averaged_weights_are_those_of_the_plain_run(make):
    plain, ours = both(callbacks=lambda: [make()], max_epochs=4, val=True, num_sanity_val_steps=0)
    assert_same_run(plain, ours)
    assert not torch.equal(ours.net[0].weight, both(max_epochs=4)[1].net[0].weight)


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_train_batch_start", "forward"])
def test_writing_to_weights_during_the_run_is_refused(moment):
    def clamp(module):
        module.net[0].weight.data.clamp_(-0.01, 0.01)

    class Clamp(pl.Callback):
        pass

    if moment != "forward":
        setattr(Clamp, moment, lambda self, trainer, pl_module, *args: clamp(pl_module))

    class Writes(Small):
        def training_step(self, batch, batch_idx):
            if moment == "forward":
                clamp(self)
            return super().training_step(batch, batch_idx)

    module = Writes(sgd)
    with pytest.raises(RuntimeError, match=r"net\.0\.weight was written to.*float32_weights"):
        quiet_trainer(HostMasterWeights(), Clamp(), precision="bf16-true").fit(module, data())
    assert module.net[0].weight.dtype is torch.float32
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


@pytest.mark.parametrize("how", ["mul_", "foreach", "part"])
@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_train_batch_start"])
def test_writes_that_rounding_would_hide_are_refused(moment, how):
    """A decay of 0.1 % changes no weight of 0.75 in bfloat16."""

    @torch.no_grad()
    def decay(self, *args):
        if how == "foreach":
            torch._foreach_mul_(list(self.parameters()), 0.999)
        elif how == "part":
            self.net[0].weight.detach()[:2].mul_(0.999)
        else:
            self.net[0].weight.mul_(0.999)

    def same():
        net = make_net()
        for parameter in net.parameters():
            parameter.data.fill_(0.75)
        return net

    module = type("Decays", (Small,), {moment: decay})(partial(sgd, lr=0.0), same)
    with pytest.raises(RuntimeError, match=r"net\.0\.weight was written to.*float32_weights"):
        quiet_trainer(HostMasterWeights(), precision="bf16-true").fit(module, data())


def test_own_code_can_write_to_the_float32_weights():
    class Clamp(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            ours = trainer.precision_plugin
            with ours.float32_weights() if isinstance(ours, HostMasterWeights) else nullcontext():
                for p in pl_module.parameters():
                    p.data.clamp_(-0.1, 0.1)

    assert_same_run(*both(callbacks=lambda: [Clamp()]))


def test_sparse_gradients_are_refused():
    class Embeds(Small):
        def output(self, x):
            ids = (x[:, 0].float() * 7).long() % 6
            return nn.functional.embedding(ids, self.net.weight, sparse=True)

    with pytest.raises(RuntimeError, match="sparse=False"):
        quiet_trainer(HostMasterWeights(), precision="bf16-true").fit(Embeds(sgd, lambda: nn.Embedding(6, 8)), data())


def test_parameters_without_gradients_scalars_and_integers():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.sometimes, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
            self.scale = nn.Parameter(torch.tensor(1.1))
            self.count = nn.Parameter(torch.tensor(3), requires_grad=False)
            self.register_buffer("table", torch.linspace(0, 1, 7))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            y = self.layer(x) * self.scale
            return y + self.sometimes(x) if self.calls % 3 == 0 else y

    plain, ours = both(configure=lambda m: sgd(m, weight_decay=0.1), net=Odd)
    assert_same_run(plain, ours)  # the table among them, which bfloat16 would have rounded


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_give_the_float32_values_back(stage, tmp_path):
    class Evaluated(Small):
        def test_step(self, batch, batch_idx):
            assert self.net[0].weight.dtype is torch.bfloat16

        predict_step = test_step

    module = Evaluated(sgd)
    run = quiet_trainer(HostMasterWeights(), precision="bf16-true", max_epochs=1)
    run.fit(module, data())
    before = copy.deepcopy(module.state_dict())
    getattr(run, stage)(module, data(1))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    run.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(value, before[name]) for name, value in saved.items())


def test_resuming_in_the_middle_and_the_best_checkpoint(tmp_path):
    def run(cls, folder, callback, precision, ckpt_path=None, **options):
        pl.seed_everything(0, verbose=False)
        module = cls(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True))
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(
            *callback, keep, precision=precision, enable_checkpointing=True, **{"max_steps": 6, **options}
        )
        trainer.fit(module, data(), ckpt_path=ckpt_path)
        return module, trainer

    plain, _ = run(Rounded, tmp_path / "plain", [], "32-true")
    ours, trainer = run(Small, tmp_path / "ours", [HostMasterWeights()], "bf16-true")
    assert_same_run(plain, ours)
    plain_half, half = (next((tmp_path / name).glob("step=3*")) for name in ("plain", "ours"))
    technique = torch.load(half, weights_only=False)["HostMasterWeights"]
    assert technique == {"technique": "host_master_weights", "weights": "float32", "optimizer_states": "float32"}
    resumed, _ = run(Rounded, tmp_path / "a", [], "32-true", plain_half)
    for number, (cls, callback, precision, path) in enumerate(
        [
            (Small, [HostMasterWeights()], "bf16-true", half),
            (Small, [HostMasterWeights()], "bf16-true", plain_half),
            (Rounded, [], "32-true", half),
        ]
    ):
        again, _ = run(cls, tmp_path / f"b{number}", callback, precision, path)
        assert_same_run(resumed, again)
    alone = Small.load_from_checkpoint(half, configure=sgd)
    saved = torch.load(plain_half, weights_only=False)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in alone.state_dict().items())
    trainer.test(ours, data(1), ckpt_path=half, verbose=False)
    assert all(torch.equal(value, saved[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("moment", ["on_before_optimizer_step", "on_train_batch_end"])
def test_an_exception_in_the_middle_leaves_a_plain_module(moment):
    class Crash(pl.Callback):
        pass

    def crash(self, trainer, *args):
        if trainer.global_step == 2 - (moment != "on_train_batch_end"):
            raise ZeroDivisionError

    setattr(Crash, moment, crash)
    module, plain = Small(sgd), Rounded(sgd)
    plain.load_state_dict(module.state_dict())
    for made, ours, precision in ((module, [HostMasterWeights()], "bf16-true"), (plain, [], "32-true")):
        with pytest.raises(ZeroDivisionError):
            quiet_trainer(*ours, Crash(), precision=precision).fit(made, data())
    assert_same_run(plain, module)
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    assert "zero_grad" not in vars(module.trainer.optimizers[0])
    module.output(torch.ones(2, 8)).sum().backward()


class CallsSuper(StepsOn, torch.optim.SGD):
    pass


def test_optimizers_that_call_the_step_of_their_base_class():
    sgd(make_net())  # from now on, torch runs hooks in the base class's step, too
    plain, ours = both(configure=lambda module: CallsSuper(module.parameters(), 0.1))
    assert_same_run(plain, ours)


@pytest.mark.parametrize("finder", [LearningRateFinder(num_training_steps=5)])
def test_searches_that_would_round_the_weights_are_refused(finder):
    with pytest.raises(ValueError, match=rf"with {type(finder).__name__}: .*float32 values are lost"):
        quiet_trainer(HostMasterWeights(), finder, precision="bf16-true").fit(Small(sgd), data())
