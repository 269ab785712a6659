"""Both of torch's interfaces, and settings of which the older can't be read any more."""

import pytest
import torch

from lightning_memfit.memory.float32_products import exact_products, precision_on_cuda, products_kept

BACKENDS = (
    torch.backends.cuda.matmul,
    torch.backends.mkldnn.matmul,
    torch.backends.cudnn.conv,
    torch.backends.cudnn.rnn,
)


EXACT = {"ieee", "none"}
"""`none` is what the older interface leaves of cuDNN's."""


@pytest.fixture(autouse=True)
def put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    for backend in BACKENDS[:2]:
        backend.fp32_precision = "ieee"
    for backend in BACKENDS[2:]:
        backend.fp32_precision = "tf32"
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def precisions() -> list[str]:
    return [backend.fp32_precision for backend in BACKENDS]


def test_settings_of_the_older_interface_are_put_back() -> None:
    torch.set_float32_matmul_precision("high")
    assert precision_on_cuda() == "tf32"
    with exact_products():
        assert set(precisions()) <= EXACT
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"
    assert precisions() == ["tf32"] * 4


def test_settings_of_the_newer_interface_are_put_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    before = precisions()
    with exact_products():
        assert set(precisions()) <= EXACT
    assert precisions() == before
    assert precision_on_cuda() == "tf32"
    restore = products_kept()
    torch.set_float32_matmul_precision("highest")
    assert precision_on_cuda() == "ieee"
    restore()
    assert precision_on_cuda() == "tf32"
