"""Names are known after the import, and importing them loads neither DeepSpeed nor the package's other parts."""

import subprocess
import sys

import pytest

from lightning_memfit.strategies.registry import NAMES
from lightning_memfit.techniques.strategies import STRATEGIES

_ONLY_IN_PLANS = ("pin_memory",)
"""Arguments that records set because a plan made sure of the room; chosen by name, a strategy uses its own default."""


def test_names_are_those_of_the_records() -> None:
    for record in STRATEGIES:
        spec = record.trainer["strategy"]
        path, arguments = NAMES[record.name]
        assert spec["class_path"].rpartition(".")[2] == path.rpartition(".")[2]
        made = {key: value for key, value in spec.get("init_args", {}).items() if key not in _ONLY_IN_PLANS}
        assert made == arguments
    assert set(NAMES) == {record.name for record in STRATEGIES}


@pytest.mark.nightly
def test_names_are_registered_without_deepspeed() -> None:
    code = (
        "import sys, lightning_memfit.strategies as s\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "s.register()\n"
        "print(sorted(name for name in StrategyRegistry if name.startswith('memfit')))\n"
        "print({'deepspeed', 'bitsandbytes', 'datasets'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in NAMES:
        assert repr(f"memfit_{name}") in output
    assert output.strip().endswith("set()")
