import json

import pytest
import yaml

from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.registry import find_technique
from lightning_memfit.techniques.core.setting import Setting


def test_order_of_choosing_does_not_matter():
    first = Setting().choose("gradient_release").choose("optimizer_8bit", min_8bit_size=8)
    second = Setting().choose("optimizer_8bit", min_8bit_size=8).choose("gradient_release")
    assert first == second
    assert hash(first) == hash(second)
    assert first.to_dict() == second.to_dict()
    assert [technique.name for technique in first.techniques()] == ["optimizer_8bit", "gradient_release"]


def test_stored_and_read_again():
    setting = Setting(4, 2).choose("adafactor").choose("activation_checkpointing", choices=("none", "full"))
    assert Setting.from_dict(json.loads(json.dumps(setting.to_dict()))) == setting
    with pytest.raises(ValueError, match="Closest: adafactor"):
        Setting.from_dict({"techniques": {"adafaktor": {}}})


def test_one_technique_of_a_kind():
    setting = Setting().choose("adafactor")
    assert setting.choose("lion").has("lion")
    assert not setting.choose("lion").has("adafactor")
    assert setting.without("optimizer") == Setting()
    with pytest.raises(ValueError, match="adafactor and lion both decide the optimizer"):
        Setting(chosen=(*setting.chosen, *Setting().choose("lion").chosen))


def test_overlay_and_sizes():
    setting = Setting(micro_batch_size=2, accumulate_grad_batches=8).choose("bf16_stochastic_rounding", seed=3)
    assert setting.precision == "bf16-true"
    assert setting.global_batch_size == 16
    assert setting.numerics == {"bf16", "stochastic"}
    overlay = yaml.safe_load(yaml.safe_dump(setting.overlay()))
    [rounding], [batching] = overlay["trainer"]["plugins+"], overlay["trainer"]["callbacks+"]
    assert overlay["trainer"]["precision"] is None  # of which the plugin takes the place
    assert overlay["trainer"]["accumulate_grad_batches"] == 1  # the loop cuts the loader's batch instead
    assert rounding["init_args"] == {"seed": 3}
    assert batching["init_args"] == {"global_batch_size": 16, "micro_batch_size": 2}
    assert Setting(micro_batch_size=2).overlay() == {}
    assert [type(callback).__name__ for callback in setting.callbacks()] == ["StochasticRounding", "MicroBatching"]
    assert [type(callback).__name__ for callback in setting.traced_callbacks()] == ["StochasticRounding"]
    assert setting.step_options(Facts(gradient_clip_val=1.0)).gradient_clip_algorithm == "norm"


def test_conflicts_name_the_technique():
    setting = Setting(1, 2).choose("gradient_release")
    first, second = setting.validate(Facts(device="cpu"))
    assert first.startswith("gradient_release: `accumulate_grad_batches=2`")
    assert second.startswith("micro_batching: with GradientRelease: ")
    assert Setting().validate(Facts()) == []


def test_options_go_where_they_are_known():
    config = find_technique("lion_8bit").config(min_8bit_size=0, drop=[])
    lion, states = config["trainer"]["callbacks+"]
    assert lion["init_args"]["drop"] == []
    assert states["init_args"] == {"min_8bit_size": 0}
    half = find_technique("bf16_mixed").config(precision="16-mixed")["trainer"]
    assert half == {"precision": "16-mixed"}
    with pytest.raises(ValueError, match=r"no option of lion_8bit\. Closest: min_8bit_size"):
        find_technique("lion_8bit").config(min_8bit_sizes=0)


@pytest.mark.parametrize("arguments", [{"micro_batch_size": 0}, {"accumulate_grad_batches": 0}, {"world_size": 0}])
def test_numbers_below_one(arguments):
    with pytest.raises(ValueError, match="must be at least 1"):
        Setting(**arguments)


def test_costs_add_up():
    moving = Cost(Work(host_link_bytes=4), overlap=True)
    total = moving + Cost(step=Work(flops=1), once_seconds=2, matmul_rate="tf32")
    assert total == Cost(Work(host_link_bytes=4), Work(flops=1), True, 2, "tf32")
    assert not (moving + Cost(Work(host_link_bytes=1))).overlap
    assert Work(flops=1, kernels=2) * 3 == Work(flops=3, kernels=6)
