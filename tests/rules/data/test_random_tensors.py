import pytest
import torch

from lightning_memfit.data import RandomTensors

IMAGES = {"pixel_values": {"shape": [3, 4, 5]}, "labels": {"shape": [], "below": 7}}


def test_batches_have_the_shapes_asked_for_and_follow_from_the_seed():
    def batch(seed):
        data = RandomTensors(IMAGES, num_samples=8, batch_size=4, seed=seed)
        data.setup("fit")
        assert (len(data._train), len(data._val)) == (8, 4)
        return next(iter(data.train_dataloader()))

    one, example = batch(0), RandomTensors(IMAGES, batch_size=4).example_batch()
    for found in (one, example):
        assert found["pixel_values"].shape == (4, 3, 4, 5)
        assert found["labels"].dtype == torch.int64
        assert found["labels"].shape == (4,)
        assert int(found["labels"].max()) < 7
    assert torch.equal(one["pixel_values"], batch(0)["pixel_values"])
    assert not torch.equal(one["pixel_values"], batch(1)["pixel_values"])


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"x": [3]},
        {"x": {"shape": 3}},
        {"x": {"shape": [0]}},
        {"x": {"shape": [3], "blow": 2}},
        {"x": {"shape": [2], "below": 0}},
    ],
)
def test_shapes_that_are_none_are_refused(tensors):
    with pytest.raises(ValueError, match="`tensors"):
        RandomTensors(tensors)
