"""How tests with several ranks end."""

import os
import signal
import time

from tests.helpers.ranks import run_ranks


def waits_for_nothing():
    if os.environ["RANK"] == "1":
        time.sleep(60)


def test_a_rank_that_is_killed_says_so_and_where_it_was(tmp_path):
    first, second = run_ranks(waits_for_nothing, 2, tmp_path, seconds=1.0)
    assert (first.code, first.output) == (0, "")
    assert second.code == -signal.SIGKILL
    assert "rank 1 had not ended after" in second.output
    assert "in waits_for_nothing" in second.output
