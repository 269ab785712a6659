from lightning_memfit.estimate.target import named_target
from lightning_memfit.planner.time import cpu_name, cpu_rates, rates_of


def test_rates_of_a_card_are_below_its_data_sheet() -> None:
    rates = rates_of(named_target("RTX 3060"))
    assert rates.name == "RTX 3060 12GB"
    assert 0 < rates.flops_per_s["bfloat16"] < 25.4e12
    assert rates.bytes_per_s < 360e9
    assert rates.asynchronous


def test_a_bare_size_takes_a_common_card_of_that_size() -> None:
    rates = rates_of(named_target("24GiB"))
    assert rates.flops_per_s == rates_of(named_target("RTX 3090")).flops_per_s
    assert rates.name == "device of 24.00 GiB"


def test_rates_of_this_cpu_are_measured() -> None:
    rates = cpu_rates()
    assert rates.name == cpu_name()
    assert rates.link_bytes_per_s is None
    assert rates.flops_per_s["float32"] > 1e8
    assert rates.bytes_per_s > 1e7
