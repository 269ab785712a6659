"""What a library remembers of a traced step, which the user's code never sees."""

import importlib
import sys

import pytest
import torch
from lightning.pytorch import LightningModule
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memfit import profile_module
from lightning_memfit.profile.libraries import KeptFakeError

LIBRARY = """
import functools, torch

TABLE, TABLES, LISTED = None, {}, []

def in_global(n):
    global TABLE
    if TABLE is None:
        TABLE = torch.rand(n)
    return TABLE

def in_dictionary(n):
    if n not in TABLES:
        TABLES[n] = (torch.rand(n), n)
    return TABLES[n][0]

def in_list(n):
    if not LISTED:
        LISTED.append(torch.rand(n))
    return LISTED[0]

@functools.cache
def in_cache(n):
    return torch.rand(n)

@functools.lru_cache(maxsize=4)
def in_limited_cache(n):
    return torch.rand(n)

class Kept:
    table, tables = None, {}

def in_class(n):
    if Kept.table is None:
        Kept.table = torch.rand(n)
    return Kept.table

def in_default(n, known={}):
    if n not in known:
        known[n] = torch.rand(n)
    return known[n]

def made():
    held = []
    def in_closure(n):
        if not held:
            held.append(torch.rand(n))
        return held[0]
    return in_closure

in_closure = made()
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Code that counts as an installed package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("some_library")
    del sys.modules["some_library"]


class Scaled(LightningModule):
    def __init__(self, table):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.table = table

    def training_step(self, batch, batch_idx):
        return self.layer(batch * self.table(8)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


PLACES = ["in_global", "in_dictionary", "in_list", "in_cache", "in_limited_cache", "in_class", "in_default"]


@pytest.mark.parametrize("place", PLACES)
def test_tables_that_a_library_keeps_are_real_afterwards(library, place):
    module = Scaled(getattr(library, place))
    profile_module(module, torch.ones(2, 8))
    assert not isinstance(module.table(8), FakeTensor)
    assert module.training_step(torch.ones(2, 8), 0).item() > 0


@pytest.mark.parametrize("place", PLACES)
def test_tables_that_were_there_stay(library, place):
    module = Scaled(getattr(library, place))
    before = module.table(8)
    profile_module(module, torch.ones(2, 8))
    assert module.table(8) is before


def test_a_dictionary_that_is_new_since_the_last_trace_is_looked_through(library):
    module = Scaled(library.in_dictionary)
    profile_module(module, torch.ones(2, 8))
    library.TABLES = {}
    profile_module(module, torch.ones(2, 8))
    assert not isinstance(module.table(8), FakeTensor)


def test_one_that_is_not_found_is_refused_where_it_is_used(library):
    module = Scaled(library.in_closure)
    profile_module(module, torch.ones(2, 8))
    with pytest.raises(KeptFakeError, match="Let it be made before training"):
        module.training_step(torch.ones(2, 8), 0)
