from dataclasses import replace
from functools import cache

import pytest

from lightning_memfit.estimate.architectures import ARCHITECTURES, NamedRun
from lightning_memfit.estimate.named_model import build_model, make_batch, optimizer_factory, trace_named
from lightning_memfit.estimate.variants import steady_step, with_gradient_release, with_optimizer
from lightning_memfit.memory import Category, Tier
from lightning_memfit.optim.gradient_release import GradientRelease
from lightning_memfit.profile.build import profile_module
from tests.unit.estimate.steps import GRADIENT, SAMPLE, SCRATCH, STATE, WEIGHT, step_profile

SMALL = replace(ARCHITECTURES["gpt2"], config={"n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 3000})


@cache
def traced(optimizer, precision, micro_batch_size):
    return trace_named(NamedRun("gpt2", micro_batch_size, 64, precision=precision, optimizer=optimizer), SMALL)


def test_steady_step_is_the_second():
    variant = steady_step(step_profile(micro_batch_size=4))
    assert {name: phase.total() for name, phase in variant.phases.items()} == {
        "forward": WEIGHT + GRADIENT + STATE + 4 * SAMPLE,
        "backward": WEIGHT + GRADIENT + STATE + 4 * SAMPLE,
        "step": WEIGHT + GRADIENT + STATE + SCRATCH,
    }
    assert variant.phase == "step"
    assert steady_step(step_profile(), 100).phase == "forward"


@pytest.mark.parametrize(
    "optimizer",
    ["sgd", "sgd_momentum", "adam", "adamw_fused", "rmsprop", "adamw_8bit", "lion", "lion_8bit"],
)
@pytest.mark.parametrize(("precision", "size"), [("32-true", 2), ("bf16-true", 16)])
def test_other_optimizers_agree_with_their_traces(optimizer, precision, size):
    predicted = with_optimizer(steady_step(traced("adamw", precision, size)), optimizer)
    real = steady_step(traced(optimizer, precision, size))
    assert predicted.breakdown.total() == pytest.approx(real.breakdown.total(), rel=0.01)
    for name in ("forward", "backward"):
        assert predicted.phases[name].total() == pytest.approx(real.phases[name].total(), abs=2048)  # 8-bit code tables
        states = real.phases[name].get(Category.OPTIMIZER_STATE)
        assert predicted.phases[name].get(Category.OPTIMIZER_STATE) == pytest.approx(states, abs=2048)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("size", [2, 16])
def test_gradient_release_agrees_with_its_trace(optimizer, size):
    released = []

    def make_optimizer(module):
        made = optimizer_factory(optimizer)(module)
        released.append(GradientRelease(made))
        return made

    model = build_model(SMALL, "sdpa")
    profile = profile_module(model, make_batch(SMALL, model.config, size, 64), make_optimizer=make_optimizer)
    predicted = with_gradient_release(traced("adamw", "32-true", size), optimizer=optimizer)
    assert 0.999 <= predicted.breakdown.total() / steady_step(profile).breakdown.total() <= 1.02


def test_paged_states_leave_the_device():
    variant = with_optimizer(steady_step(step_profile()), "paged_adamw")
    assert variant.breakdown.get(Category.OPTIMIZER_STATE) == 0
    assert variant.breakdown.get(Category.OPTIMIZER_STATE, Tier.HOST) == STATE


def test_what_arithmetic_cannot_tell_is_refused():
    with pytest.raises(ValueError, match="profile the model with it"):
        with_optimizer(steady_step(step_profile()), "adafactor")
    with pytest.raises(ValueError, match="on the CPU"):
        with_optimizer(steady_step(step_profile(device="cpu")), "sgd")
    with pytest.raises(ValueError, match="accumulate_grad_batches=4"):
        with_gradient_release(replace(step_profile(), accumulate_grad_batches=4))
