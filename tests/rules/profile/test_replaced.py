"""What is replaced or quiet for a while."""

import gc
import logging

import pytest
import torch
from torch.utils._device import _device_constructors

from lightning_memfit.profile.quiet import collector_paused, loggers_at
from lightning_memfit.profile.replaced import replaced


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


def test_what_torch_lists_at_first_use_are_its_own_functions():
    """It keeps the list: with another function in it, `torch.tensor` would no longer heed `with torch.device(...)`."""
    _device_constructors.cache_clear()
    with replaced(torch, "tensor", lambda *values: torch.zeros(1)), torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"
    with torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"


def test_loggers_get_their_own_levels_back(caplog):
    logger = logging.getLogger("memfit.test.quiet")
    logger.setLevel(logging.INFO)
    with loggers_at(logging.CRITICAL, logger.name):
        logger.error("unheard")
    logger.info("heard")
    assert [record.message for record in caplog.records] == ["heard"]
    assert logger.level == logging.INFO


def test_the_collector_rests_until_the_outermost_end_or_an_error():
    with pytest.raises(KeyError), collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
