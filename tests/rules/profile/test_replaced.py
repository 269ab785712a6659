"""Attributes and functions that are replaced for a while."""

import sys
from types import ModuleType

import numpy
import pytest
import torch
from torch.utils._device import _device_constructors

from lightning_memfit.profile.replaced import replaced, replaced_everywhere


def test_replaced_attributes_come_back():
    class Owner:
        there = 1

    def fail():
        with replaced(Owner, "there", 2), replaced(Owner, "new", 3):
            assert (Owner.there, Owner.new) == (2, 3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert Owner.there == 1
    assert not hasattr(Owner, "new")


def original():
    """A function of some library."""


def other():
    """What takes its place."""


@pytest.fixture(params=["user", "library"])
def module(request, monkeypatch):
    module = ModuleType("names_it")
    module.__file__ = numpy.__file__ if request.param == "library" else __file__
    monkeypatch.setitem(sys.modules, "names_it", module)
    return module


def test_functions_are_replaced_under_any_name(module):
    module.under_another_name = original
    for _ in range(2):
        with replaced_everywhere({original: other}):
            assert module.under_another_name is other
        assert module.under_another_name is original


def test_modules_that_name_them_later_are_found(module):
    with replaced_everywhere({original: other}):
        pass
    module.original = original
    with replaced_everywhere({original: other}):
        assert module.original is other
    assert module.original is original


def test_names_that_are_bound_anew_are_found(module):
    module.original = other
    with replaced_everywhere({original: other}):
        pass
    module.original = original
    with replaced_everywhere({original: other}):
        assert module.original is other
    assert module.original is original


def test_modules_are_not_asked(monkeypatch):
    class Lazy(ModuleType):
        def __getattribute__(self, name):
            asked.append(name)
            return super().__getattribute__(name)

    asked = []
    lazy = Lazy("lazy")
    lazy.original = original
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    asked.clear()
    with replaced_everywhere({original: other}):
        assert vars(lazy)["original"] is other
        asked.remove("__dict__")  # of the line above
    assert not asked


def test_what_was_looked_for_before_hides_nothing_else(module):
    module.other = other
    with replaced_everywhere({original: len}):
        pass
    with replaced_everywhere({other: original}):
        assert module.other is original
    assert module.other is other


def test_what_torch_lists_at_first_use_are_its_own_functions():
    """It keeps the list: with another function in it, `torch.tensor` would no longer heed `with torch.device(...)`."""
    _device_constructors.cache_clear()
    with replaced(torch, "tensor", lambda *values: torch.zeros(1)), torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"
    with torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"
