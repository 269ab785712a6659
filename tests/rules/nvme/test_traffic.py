from lightning_memfit.nvme.traffic import step_traffic


def test_bytes_per_parameter_of_adam() -> None:
    bf16, fp32 = step_traffic(1, 1, 2), step_traffic(1, 1, 4)
    assert (bf16.read_bytes, bf16.written_bytes) == (20, 18)
    assert (fp32.read_bytes, fp32.written_bytes) == (24, 20)


def test_micro_batches_read_weights_again_and_write_nothing() -> None:
    plain, more = step_traffic(1, 1), step_traffic(1, 1, micro_batches=3)
    assert more.read_bytes - plain.read_bytes == 2 * (6 - 2)
    assert more.written_bytes == plain.written_bytes
