import pytest
import torch

from lightning_memfit.techniques.tf32 import TF32
from tests.contract.cases import module
from tests.contract.runs import LanguageModel, fit


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_switches_and_switches_back(precision):
    before = torch.get_float32_matmul_precision()
    callback = TF32(precision)
    callback.apply(None, None)
    assert torch.get_float32_matmul_precision() == precision
    callback.restore()
    assert torch.get_float32_matmul_precision() == before


def test_other_devices_are_refused():
    if torch.cuda.is_available():
        pytest.skip("the device has TF32")
    with pytest.raises(ValueError, match="TF32 is computed by CUDA devices only"):
        fit([TF32()], LanguageModel)
    with pytest.raises(ValueError, match="precision='low'"):
        TF32("low")


@pytest.mark.gpu
def test_losses_stay_close_and_the_setting_is_put_back():
    before = torch.get_float32_matmul_precision()
    ours, plain = (fit(callbacks, module, accelerator="gpu") for callbacks in ([TF32()], []))
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(plain.losses), rtol=1e-2, atol=0)
    assert torch.get_float32_matmul_precision() == before
