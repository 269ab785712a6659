"""Names are known after the import, and importing them loads neither DeepSpeed nor the package's other parts."""

import subprocess
import sys

import pytest


@pytest.mark.nightly
def test_names_are_registered_without_deepspeed():
    code = (
        "import sys, lightning_memfit.strategies as s\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "s.register()\n"
        "print(sorted(name for name in StrategyRegistry if name.startswith('memfit')))\n"
        "print({'deepspeed', 'bitsandbytes', 'datasets'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in (
        "memfit_ddp",
        "memfit_fsdp2",
        "memfit_zero_1",
        "memfit_zero_2",
        "memfit_zero_3",
        "memfit_zero_offload",
    ):
        assert repr(name) in output
    assert output.strip().endswith("set()")
