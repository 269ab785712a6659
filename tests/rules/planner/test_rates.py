import torch

from lightning_memfit.estimate.target import named_target
from lightning_memfit.planner.measured import measure
from lightning_memfit.planner.rates import CalibrationFile, Measured, calibrated, cpu_name, cpu_rates, rates_of


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


def test_what_doctor_measured_is_what_plans_take(tmp_path) -> None:
    found = measure(torch.device("cpu"))
    assert {"product float32", "attention float32", "elementwise", "function", "indexing"} <= set(found.operators)
    assert 1e-7 < found.launch_seconds < 1e-3
    rates = cpu_rates()
    CalibrationFile(rates.name, tmp_path).keep(found)
    assert calibrated(rates, tmp_path).operators == found.operators
    assert calibrated(rates, tmp_path).launch_seconds == found.launch_seconds


def test_a_measurement_keeps_later_steps_and_lets_earlier_ones_go(tmp_path) -> None:
    file, found = CalibrationFile("a card", tmp_path), Measured({"elementwise": 1e9}, 1e-6, 1.0)
    file.add({"memory": 1.0}, 2.0)
    file.keep(found)
    assert (file.measured(), file.load()) == (found, [])
    file.add({"memory": 1.0}, 3.0)
    assert (file.measured(), len(file.load())) == (found, 1)
