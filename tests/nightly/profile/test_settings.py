"""What a step sets of its process is set back."""

import logging
import math
import sys
import threading

from lightning_memfit.profile.settings import kept_settings


def test_modules_loggers_and_the_threads_name_are_put_back() -> None:
    name, logger = threading.current_thread().name, "memfit.made.in.a.step"
    with kept_settings():
        sys.modules["put_in_by_a_step"] = math
        logging.getLogger(logger).setLevel(logging.ERROR)
        logging.getLogger(logger).addHandler(logging.NullHandler())
        threading.current_thread().name = "renamed"
    assert "put_in_by_a_step" not in sys.modules
    assert logging.getLogger(logger).level == logging.NOTSET
    assert not logging.getLogger(logger).handlers
    assert threading.current_thread().name == name


def test_what_was_imported_or_is_not_the_steps_stays() -> None:
    with kept_settings(step=lambda name: False):
        sys.modules["put_in_by_others"] = math
    assert sys.modules.pop("put_in_by_others") is math
