import pytest

from lightning_memfit.memory import Category, Tier
from tests.helpers.closed_forms import model_states

PSI = 7_500_000_000


def gigabytes(**options):
    return model_states(PSI, "half-master", "adamw", world_size=64, **options).total() / 1e9


@pytest.mark.parametrize(("stage", "expected"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_example_of_75_billion_parameters_on_64_devices(stage, expected):
    # Rajbhandari et al. 2020, figure 1
    assert gigabytes(zero_stage=stage) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("devices", [1, 4, 16, 64, 256, 1024])
def test_zero_table(devices):
    # baseline (2+2+K)Ψ; 1: 2Ψ+2Ψ+KΨ/N; 2: 2Ψ+(2+K)Ψ/N; 3: (2+2+K)Ψ/N, with K = 12
    expected = [16, 4 + 12 / devices, 2 + 14 / devices, 16 / devices]
    for stage, per_parameter in enumerate(expected):
        states = model_states(PSI, "half-master", "adamw", zero_stage=stage, world_size=devices)
        assert states.total() / PSI == pytest.approx(per_parameter, rel=1e-7)


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("32-true", "adamw", 16),
        ("bf16-mixed", "adamw", 16),
        ("amp-copy", "adamw", 18),
        ("half-master", "adamw", 16),
        ("32-true", "sgd_momentum", 12),
        ("32-true", "sgd", 8),
        ("bf16-true", "adamw", 8),  # torch's states have the dtype of the weights
        ("bf16-true", "lion", 8),  # bitsandbytes' states are fp32
    ],
)
def test_bytes_per_parameter(precision, optimizer, per_parameter):
    assert model_states(1_000_000, precision, optimizer).total() == per_parameter * 1_000_000


def test_eight_bit_states_need_two_bytes_and_scales():
    states = model_states(1_000_000, "32-true", "adamw_8bit").get(Category.OPTIMIZER_STATE)
    assert states == pytest.approx(1_000_000 * 2 * (1 + 4 / 256))


def test_offloaded_states_change_the_tier_only():
    on_device = model_states(PSI, "half-master", "adamw", 3, 4)
    offloaded = model_states(PSI, "half-master", "adamw", 3, 4, offload_optimizer="nvme", offload_parameters="cpu")
    assert offloaded.total(Tier.DEVICE) == 0
    assert offloaded.total(Tier.DISK) + offloaded.total(Tier.HOST) == on_device.total()
    assert offloaded.get(Category.PARAMETER, Tier.HOST) == on_device.get(Category.PARAMETER)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"world_size": 0}, "world_size=0"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"optimizer": "adamv"}, "optimizer='adamv'"),
        ({"offload_optimizer": "cpu"}, "zero_stage"),
        ({"offload_optimizer": "nvme", "zero_stage": 2}, "zero_stage=3"),
        ({"offload_parameters": "cpu", "zero_stage": 2}, "zero_stage=3"),
        ({"offload_parameters": "tape", "zero_stage": 3}, "offload_parameters='tape'"),
    ],
)
def test_mistakes_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        model_states(1000, **options)
