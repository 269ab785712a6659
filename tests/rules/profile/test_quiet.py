import gc
import logging

import pytest

from lightning_memfit.profile.quiet import collector_paused, loggers_at


def test_loggers_get_their_own_levels_back(caplog):
    logger = logging.getLogger("memfit.test.quiet")
    logger.setLevel(logging.INFO)
    with loggers_at(logging.CRITICAL, logger.name):
        logger.error("unheard")
    logger.info("heard")
    assert [record.message for record in caplog.records] == ["heard"]
    assert logger.level == logging.INFO


def test_the_collector_rests_until_the_outermost_end():
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_comes_back_after_an_error():
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()
