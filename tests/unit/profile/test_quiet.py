import logging

from lightning_memfit.profile.quiet import loggers_at


def test_loggers_get_their_own_levels_back(caplog):
    logger = logging.getLogger("memfit.test.quiet")
    logger.setLevel(logging.INFO)
    with loggers_at(logging.CRITICAL, logger.name):
        logger.error("unheard")
    logger.info("heard")
    assert [record.message for record in caplog.records] == ["heard"]
    assert logger.level == logging.INFO
