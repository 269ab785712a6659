from dataclasses import replace

from tests.unit.planner.made import made_workload


def test_batches_of_a_loader_that_stays_are_cut_evenly_and_wait_on_the_device() -> None:
    free = made_workload(900, samples_per_step=8)
    assert free.sizes() == (1, 2, 4, 8)
    assert free.waiting_bytes(1) == 0
    cut = replace(free, loader_batch=2)
    assert cut.sizes() == (1, 2)
    assert cut.waiting_bytes(1) == 16 * 8  # one sample of 16 int64 tokens
    assert cut.waiting_bytes(2) == cut.waiting_bytes(4) == 0
