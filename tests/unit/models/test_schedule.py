import pytest

from lightning_memfit.models.optimizer import cosine_with_warmup


def factor(step, warmup_steps=4, total_steps=12, floor=0.1):
    return cosine_with_warmup(step, warmup_steps=warmup_steps, total_steps=total_steps, floor=floor)


def test_rises_linearly_then_falls_to_the_floor():
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(8) == pytest.approx(0.55)
    assert factor(12) == factor(100) == pytest.approx(0.1)


def test_no_warmup():
    assert factor(0, warmup_steps=0) == 1.0


def test_a_run_that_ends_warming_up():
    assert factor(1, warmup_steps=100, total_steps=2) == 0.02
