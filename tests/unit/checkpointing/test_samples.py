import pytest
import torch

from lightning_memfit.checkpointing import samples


@pytest.fixture(autouse=True)
def no_indices():
    samples._indices.cache_clear()
    yield
    samples._indices.cache_clear()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (384,), (3, 0), (6, 64), (12, 32), (2, 3, 64), (5, 1, 1009)])
def test_samples_are_of_the_elements_in_the_order_of_rows(shape):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    contiguous = tensor.contiguous().stride()
    expected = samples._spread(shape, contiguous, tensor.numel(), samples._NUM_ELEMENTS)
    assert samples._indices(tensor.numel(), tensor.device, None).tolist() == expected
    if tensor.numel():
        transposed = tensor.transpose(0, -1).contiguous().transpose(0, -1) if shape else tensor
        assert samples._taken(transposed).tolist() == expected


def test_shapes_of_as_many_elements_share_their_indices():
    for shape in ((6, 64), (12, 32), (384,), (2, 3, 64)):
        samples._taken(torch.zeros(shape))
    assert samples._indices.cache_info().misses == 1


def test_indices_are_sent_without_waiting_and_once_per_stream(monkeypatch):
    sent = []

    class OnHost:
        def __init__(self, places, pin_memory=False, device=None):
            self.place = "pinned" if pin_memory and device == "cpu" else device

        def to(self, device, non_blocking=False):
            sent.append((self.place, device, non_blocking))
            return self

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "tensor", OnHost)
    for stream in ("main", "main", "side"):
        samples._indices(384, device, stream)
    assert sent == [("pinned", device, True)] * 2
