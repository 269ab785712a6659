import pytest
import torch

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.block_figures import BudgetError
from lightning_memfit.profile import trace
from lightning_memfit.profile.build import measure_step
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from tests.contract.runs import LanguageModel, assert_same_weights, fit, loader, trainer
from tests.truth.profile.modules import trace_step


def build():
    return LanguageModel(n_layer=5)


@pytest.fixture(scope="module", autouse=True)
def traces_are_shared():
    """Every plan here is for the same step: what a choice does to it is traced once, and not anew for each budget."""
    known = {}

    def traced(request):
        (callback,) = request.workload.callbacks
        assert callback.blocks is None
        settings = (request.workload.options, request.emulation, request.shorten)
        key = (callback.mode, callback.keep, callback.choices, *settings)
        if key not in known:
            known[key] = trace.trace_step(request)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_memfit.techniques.checkpointing_budget.trace_step", traced)
        yield


@pytest.fixture(scope="module")
def plain():
    return fit(module=build)


@pytest.fixture(scope="module")
def peak(plain):
    profile = measure_step(build(), next(iter(loader())))
    return int(profile.events.live_bytes()[profile.events.phases[0][0] :].max())


@pytest.mark.nightly
def test_losses_weights_and_random_numbers_are_those_of_the_plain_run(plain, caplog):
    callback = ActivationCheckpointing(budget="60%")
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        ours = fit([callback], build)
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert_same_weights(ours, plain)
    assert vars(ours).keys() == vars(plain).keys()
    choices = callback.resolved.plan.choices
    assert len(choices) == 5
    assert len(set(choices)) > 1
    said = [record.message for record in caplog.records if record.message.startswith("ActivationCheckpointing: ")]
    assert len(said) == 1
    for part in ("budget 60%", " x none", "predicted peak", "% more time", "5 x GPT2Block found"):
        assert part in said[0]


@pytest.mark.nightly
def test_executed_peak_is_within_a_size(peak):
    callback = ActivationCheckpointing(budget=peak - 100_000)
    fit([callback], build)
    plan = callback.resolved.plan
    profile = measure_step(build(), next(iter(loader())), callbacks=(ActivationCheckpointing(choices=plan.choices),))
    measured = int(profile.events.live_bytes()[profile.events.phases[0][0] :].max())
    assert measured <= peak - 100_000 < peak
    assert plan.peak_bytes == pytest.approx(measured, rel=0.005)


def test_auto_keeps_a_memory_limit(plain, peak):
    limit = MemoryLimit(peak - 50_000)
    callback = ActivationCheckpointing(budget="auto")
    ours = fit([limit, callback], build)
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert limit.ledger.num_ooms == 0
    assert set(callback.resolved.plan.choices) != {"none"}
    with pytest.raises(torch.OutOfMemoryError):
        fit([MemoryLimit(peak - 50_000)], build)


def test_auto_on_the_cpu_needs_a_limit():
    with pytest.raises(ValueError, match="MemoryLimit"):
        fit([ActivationCheckpointing(budget="auto")], build)


def test_out_of_reach_names_the_least_and_leaves_nothing():
    module = build()
    with pytest.raises(BudgetError, match="least that any plan needs"):
        trainer([ActivationCheckpointing(budget="100kB")]).fit(module, loader())
    assert "configure_model" not in vars(module)


def test_a_trace_follows_the_plan_and_asks_for_one():
    callback = ActivationCheckpointing(budget="60%")
    batch = next(iter(loader()))
    with pytest.raises(TraceError, match="has no plan yet"):
        trace_step(build(), batch, StepOptions(), Emulation("cpu"), (callback,))
    fit([callback], build)
    traced = trace_step(build(), batch, StepOptions(), Emulation("cpu"), (callback,))
    live = traced.events.live_bytes()[traced.events.phases[0][0] :]
    assert int(live.max()) == callback.resolved.plan.peak_bytes


@pytest.mark.parametrize("budget", ["much", "140%", "-3%", "x%", 0])
def test_wrong_budgets(budget):
    with pytest.raises(ValueError, match="`budget="):
        ActivationCheckpointing(budget=budget)


def test_a_budget_excludes_what_it_decides():
    for arguments in ({"mode": "none"}, {"choices": ["full"]}):
        with pytest.raises(ValueError, match="leave mode and choices out"):
            ActivationCheckpointing(budget="40%", **arguments)


def test_what_cannot_be_planned_for_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"can't be planned for: the training data is empty.*choose `mode`"):
        trainer([ActivationCheckpointing(budget="60%")]).fit(build(), [])
