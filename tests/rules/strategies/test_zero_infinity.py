import inspect

import pytest

pytest.importorskip("deepspeed")

import torch

from lightning_memfit.strategies.upstream.deepspeed import (
    copy_parameters_from_swap_buffers,
    swap_in_own_dtype,
)
from lightning_memfit.strategies.zero_infinity import ZeroInfinityStrategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_optimizer": False, "offload_parameters": False}, "use `memfit_zero_3`"),
        ({"params_in_host": -1}, "params_in_host=-1"),
        ({"stage": 2}, "`stage` must be 3"),
        ({"disk_reserve": "much"}, "disk_reserve='much'"),
    ],
)
def test_arguments_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroInfinityStrategy("/somewhere", **options)


def test_folder_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_NVME_PATH", raising=False)
    with pytest.raises(ValueError, match="name a folder on a local NVMe drive, or set MEMFIT_NVME_PATH"):
        ZeroInfinityStrategy()
    monkeypatch.setenv("MEMFIT_NVME_PATH", "/mnt/drive")
    assert ZeroInfinityStrategy().nvme_path == "/mnt/drive"


def test_upstream_still_hands_out_swap_buffers() -> None:
    """What `copy_parameters_from_swap_buffers` is for; and it may be called twice."""
    from deepspeed.runtime.zero import partition_parameters

    copy_parameters_from_swap_buffers()
    inits = [partition_parameters.NoGatherHandle.__init__, partition_parameters.NoGatherCoalescedHandle.__init__]
    copy_parameters_from_swap_buffers()
    for init, handle in zip(
        inits, (partition_parameters.NoGatherHandle, partition_parameters.NoGatherCoalescedHandle), strict=True
    ):
        assert handle.__init__ is init
    source = inspect.getsource(partition_parameters)
    assert "param.data = param.ds_tensor.data.to(device=get_accelerator().current_device_name()" in source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_swapped_in_the_dtype_of_a_module_made_before(dtype: torch.dtype) -> None:
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Init

    swap_in_own_dtype()
    heeding = Init._set_dtype
    swap_in_own_dtype()
    assert Init._set_dtype is heeding
    made = Init.__new__(Init)
    made._set_dtype(None, dtype)
    assert made.dtype == dtype


def test_optimizers_that_can_not_be_swapped() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))

    class Mine(torch.optim.SGD):
        pass

    strategy = ZeroInfinityStrategy("/somewhere")
    strategy._check_optimizer(torch.optim.AdamW([weight]))
    with pytest.raises(Exception, match=r"Mine can't keep its states on disk.*`offload_optimizer: false`"):
        strategy._check_optimizer(Mine([weight]))
    ZeroInfinityStrategy("/somewhere", offload_optimizer=False)._check_optimizer(Mine([weight]))
