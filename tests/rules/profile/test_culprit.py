import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cli
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.profile.culprit import is_of_this_package, owner_of


def test_classes_of_the_package_and_its_command_line_are_its_own():
    from cli.errors import RunFailedError

    assert is_of_this_package(MemoryLimit)
    assert is_of_this_package(RunFailedError)
    assert not is_of_this_package(Path)


def test_a_neighbour_whose_name_begins_alike_is_the_user_s(monkeypatch):
    """`client.py` beside a checkout's folder `cli` is no part of it."""
    client = ModuleType("client")
    client.__file__ = str(Path(cli.__file__).parents[1] / "client.py")
    monkeypatch.setitem(sys.modules, "client", client)
    assert not is_of_this_package(type("Client", (), {"__module__": "client"}))
    assert owner_of(client.__file__) == "user"


@pytest.mark.parametrize("name", ["torchmetrics", "torchvision", "torchao"])
def test_packages_whose_names_begin_like_torch_s_are_libraries(name):
    installed = Path(torch.__file__).parents[1]
    assert owner_of(str(installed / name / "functional.py")) == "library"
    assert owner_of(torch.__file__) == "machinery"
