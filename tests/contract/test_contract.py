"""What every technique of the registry keeps, written once."""

import copy
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_memfit.memory.wrapping import Layered
from lightning_memfit.techniques.core.registry import TECHNIQUES, find_technique
from lightning_memfit.techniques.core.setting import Setting
from tests.contract.cases import CASES, CPU, Case, all_cases, can_run, module
from tests.contract.peaks import assert_predicted_peak_is_measured
from tests.contract.runs import assert_same_weights, fit, loader, trainer

ROOT = Path(__file__).parents[2]
NAMES = [technique.name for technique in TECHNIQUES]


def run_options(case: Case) -> dict:
    return {"precision": case.setting.precision, **case.trainer}


def ours(case: Case, *others: pl.Callback, **options):
    """A run of the case. Micro-batching halves the loader's batches of two."""
    return fit([*case.setting.callbacks(), *others], module, **{**run_options(case), **options})


@pytest.fixture(scope="module")
def plain():
    """Plain runs by what the Trainer was told besides the technique."""
    runs = {}

    def run(case: Case):
        key = str(sorted(case.trainer.items()))
        if key not in runs:
            runs[key] = fit(module=module, **case.trainer)
        return runs[key]

    return run


@pytest.fixture(params=all_cases(), ids=lambda value: f"{value[0]}-{value[1]}")
def case(request) -> Case:
    name, _, case = request.param
    reason = can_run(name, case)
    if reason is not None:
        pytest.skip(reason)
    return case


def test_every_technique_has_cases_and_every_case_a_technique():
    assert sorted(CASES) == sorted(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    for name, cases in CASES.items():
        assert any(case.conflicts for case in cases), name
        assert all(name in [c.name for c in case.setting.chosen] for case in cases), name


@pytest.mark.nightly_cases(
    "paged",
    "fused_adamw",
    "lion",
    "bf16_mixed",
    "bf16_true",
    "bf16_stochastic_rounding-2",
    "zero_grad_after_step",
    "activation_checkpointing-1",
    "activation_checkpointing-2",
    "attention_kernel-1",
    "gradient_release",
)
@pytest.mark.nightly_cases(
    "adafactor",
    "bf16_stochastic_rounding-1",
    "gradient_release-1",
    "host_master_weights-1",
    "torchao",
    "zero_grad_after_step-1",
    "qlora-1",
    "qlora-0",
    "lora_8bit-0",
)
def test_predicted_peak_is_the_measured_one(case):
    if not all(technique.traced for technique in case.setting.techniques()):
        pytest.skip("changes nothing that a traced step allocates; see its own tests")
    refused = case.setting.validate(CPU.facts)
    if refused:
        pytest.skip(f"refused on the CPU: {refused[0]}")
    options = {"precision": case.setting.precision, **case.trainer}
    assert_predicted_peak_is_measured(case.setting.traced_callbacks(), module().configure, **options)


@pytest.mark.nightly_cases("torchao_adamw_4bit-0", "torch_compile-0")
def test_numbers(case, plain):
    run, reference = ours(case), plain(case)
    expected = torch.stack(reference.losses)
    # `MicroBatching` leaves an item per micro-batch.
    losses = torch.stack(run.losses).float().unflatten(0, (len(expected), -1)).mean(1)
    if case.tolerance is None:
        assert losses[-1] < losses[0]
    elif case.tolerance == 0.0:
        assert torch.equal(losses, expected)
        assert_same_weights(run, reference)
    else:
        torch.testing.assert_close(losses, expected, rtol=case.tolerance, atol=0)
    assert case.setting.numerics == frozenset() or case.tolerance != 0.0
    assert_nothing_is_left(run, reference, case)


def assert_nothing_is_left(run, reference, case) -> None:
    """Everything but the values of the weights, and adapters with the layers below, is as a plain run leaves it."""
    for name, child in run.named_modules():
        if case.setting.of_kind("adapter") is None:
            assert vars(child).keys() == vars(reference.get_submodule(name)).keys(), name
        assert not child._forward_hooks, name
        assert not child._forward_pre_hooks, name
    assert not any(parameter._post_accumulate_grad_hooks for parameter in run.parameters())
    assert not wrapped(run.seen["trainer"])
    assert type(run.configure_optimizers()["optimizer"]) is torch.optim.AdamW


def wrapped(run: pl.Trainer) -> list[str]:
    """Names of the Trainer's parts' methods that still have a layer around them."""
    owners = (run.strategy, run.precision_plugin, run.fit_loop._data_source)
    return [name for owner in owners for name, value in vars(owner).items() if isinstance(value, Layered)]


class Crash(pl.Callback):
    def on_train_batch_start(self, *args):
        raise ZeroDivisionError


def crashed(callbacks, **options):
    """A run that fails before the first step; `untouched` are its first weights."""
    pl.seed_everything(0, verbose=False)
    model = module()
    model.seen["untouched"] = copy.deepcopy(model.state_dict())
    model.seen["trainer"] = run = trainer([*callbacks, Crash()], **options)
    with pytest.raises(ZeroDivisionError):
        run.fit(model, loader())
    return model


def test_an_exception_leaves_every_bit_as_it_was(case):
    switches = global_switches()
    model, reference = crashed(case.setting.callbacks(), **run_options(case)), crashed([], **run_options(case))
    converted = run_options(case)["precision"] == "bf16-true" and not case.setting.has("host_master_weights")
    assert case.setting.of_kind("adapter") or model.state_dict().keys() == model.seen["untouched"].keys()
    for name, value in model.state_dict().items():
        before = model.seen["untouched"].get(name.replace(".base_layer.", "."))
        if before is None or before.shape != value.shape:  # adapters, and layers in 4 bits
            continue
        if value.dtype is torch.int8:  # layers in 8 bits
            continue
        assert torch.equal(value, before.bfloat16() if converted and before.is_floating_point() else before), name
    assert_nothing_is_left(model, reference, case)
    assert global_switches() == switches


def global_switches() -> tuple:
    kernels = torch.backends.cuda
    return (
        torch.get_float32_matmul_precision(),
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
        torch.get_default_dtype(),
    )


@pytest.mark.nightly_cases(
    "torch_compile",
    "paged",
    "qlora-0",
    "lora_8bit",
    "bf16_stochastic_rounding-1",
    "zero_grad_after_step-1",
    "host_master_weights-1",
    "activation_checkpointing-1",
    "activation_checkpointing-2",
    "attention_kernel-1",
    "micro_batching",
)
@pytest.mark.nightly_cases("torchao_adamw_4bit-0")
def test_resume_is_bitwise(case, tmp_path):
    def run(**options):
        return ours(case, max_steps=-1, limit_train_batches=2, **options)

    straight = run(max_epochs=3)
    run(max_epochs=1).seen["trainer"].save_checkpoint(tmp_path / "half.ckpt")
    resumed = run(max_epochs=3, ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(torch.stack(resumed.losses), torch.stack(straight.losses[len(straight.losses) // 3 :]))
    assert_same_weights(resumed, straight)


@pytest.mark.parametrize("name", NAMES)
def test_conflicts_are_refused_with_reason_and_fix(name):
    technique = find_technique(name)
    for case in CASES[name]:
        options = next(choice.options for choice in case.setting.chosen if choice.name == name)
        for run, message in case.conflicts:
            assert message in str(technique.unsupported(run, options)), message


@pytest.mark.parametrize("name", NAMES)
def test_documented(name):
    technique = find_technique(name)
    assert (ROOT / f"docs/techniques/{technique.page or name}.md").is_file()


@pytest.mark.nightly
def test_records_need_nothing_optional():
    program = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("bitsandbytes", "peft", "torchao", "liger_kernel"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from lightning_memfit.techniques.core.registry import TECHNIQUES
for technique in TECHNIQUES:
    technique.config()
assert not {"bitsandbytes", "peft", "torchao"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("lightning_memfit.extras.find_spec", lambda name: None)
    for technique in TECHNIQUES:
        if technique.package:
            assert "pip install" in str(technique.missing())
            assert Setting().choose(technique.name).validate(CASES[technique.name][0].conflicts[0][0].facts)
            with pytest.raises(ModuleNotFoundError, match=technique.name):
                technique.build()
