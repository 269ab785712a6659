import pytest

from lightning_memfit.nvme.traffic import step_traffic


def test_bytes_per_parameter_of_adam() -> None:
    bf16, fp32 = step_traffic(1, 1, 2), step_traffic(1, 1, 4)
    assert (bf16.read_bytes, bf16.written_bytes) == (20, 18)
    assert (fp32.read_bytes, fp32.written_bytes) == (24, 20)


def test_micro_batches_and_recomputation_read_weights_again_and_write_nothing() -> None:
    plain, more = step_traffic(1, 1), step_traffic(1, 1, micro_batches=3, recomputes=True)
    assert more.read_bytes - plain.read_bytes == 2 * (9 - 2)
    assert more.written_bytes == plain.written_bytes


def test_time_and_endurance() -> None:
    traffic = step_traffic(10**9, 10**9)
    seconds = traffic.seconds(2e9, 1e9)
    assert seconds == pytest.approx(10 + 18)
    assert traffic.written_per_day(seconds) == pytest.approx(18e9 * 86400 / 28)
    assert traffic.days_of_endurance(600, seconds) == pytest.approx(600e12 / (18e9 * 86400 / 28))
