import pytest

from lightning_memfit.strategies import FullyShardedStrategy, ZeroStrategy
from lightning_memfit.strategies.zero_config import ZeroOptions


def zero(raw=None, **options):
    return ZeroOptions(**{"stage": 3, **options}).config({"zero_optimization": raw or {}})["zero_optimization"]


def test_arguments_become_sections():
    section = zero(offload_optimizer=True, offload_parameters=True, pin_memory=True, bucket_size=7, sub_group_size=9)
    assert section["stage"] == 3
    assert section["offload_optimizer"] == section["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert section["reduce_bucket_size"] == section["allgather_bucket_size"] == 7
    assert section["sub_group_size"] == 9


def test_raw_options_are_laid_over_without_changing_them():
    raw = {"offload_optimizer": {"ratio": 0.5}, "reduce_bucket_size": 11, "overlap_comm": False}
    section = zero(raw, offload_optimizer=True)
    assert section["offload_optimizer"] == {"device": "cpu", "pin_memory": False, "ratio": 0.5}
    assert section["reduce_bucket_size"] == 11
    assert section["overlap_comm"] is False
    assert raw["offload_optimizer"] == {"ratio": 0.5}
    assert ZeroOptions(2).config({"wall_clock_breakdown": True})["wall_clock_breakdown"] is True


@pytest.mark.parametrize(
    ("raw", "options", "argument"),
    [
        ({"stage": 2}, {}, "stage"),
        ({"offload_optimizer": {"device": "cpu"}}, {}, "offload_optimizer"),
        ({"offload_optimizer": {"device": "nvme"}}, {"offload_optimizer": True}, "offload_optimizer"),
        ({"offload_optimizer": {"device": "nvme"}}, {"stage": 2}, "offload_optimizer"),
        ({"offload_param": {"device": "nvme"}}, {}, "offload_parameters"),
        ({"reduce_bucket_size": 3}, {"bucket_size": 4}, "bucket_size"),
        ({"sub_group_size": 3}, {"sub_group_size": 4}, "sub_group_size"),
        (
            {"offload_optimizer": {"pin_memory": False}},
            {"offload_optimizer": True, "pin_memory": True},
            "pin_memory",
        ),
    ],
)
def test_contradictions_are_refused(raw, options, argument):
    with pytest.raises(ValueError, match=f"contradicts `{argument}`"):
        zero(raw, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0}, "`stage=0` must be 1, 2 or 3"),
        ({"stage": 2, "offload_parameters": True}, "`offload_parameters=True` needs `stage=3`"),
        ({"stage": 2, "sub_group_size": 5}, "`sub_group_size=5` needs `stage=3`"),
        ({"bucket_size": -1}, "`bucket_size=-1` must be at least 1"),
        ({"pin_memory": True}, "`pin_memory=True` pins what is offloaded"),
    ],
)
def test_impossible_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zero(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {}}, "`config.zero_optimisation`: .* Did you mean `zero_optimization`?"),
        ({"gradient_cliping": 1.0}, "Did you mean `gradient_clipping`?"),
        ({"train_batch_size": 3}, "`config.train_batch_size=3`: leave it out"),
    ],
)
def test_names_that_deepspeed_would_ignore_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        ZeroStrategy(config=config)


@pytest.mark.parametrize("name", ["bf16", "int8", "Tensor"])
def test_weights_are_gathered_in_floating_point(name):
    with pytest.raises(ValueError, match=f"`gather_dtype='{name}'` is no floating-point dtype"):
        FullyShardedStrategy(gather_dtype=name)
