"""How tests with several ranks end."""

import importlib
import os
import signal
import sys
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


def was_imported(name):
    known = name in sys.modules
    importlib.import_module(name)
    return known


def test_what_one_rank_imports_later_ones_have(tmp_path, monkeypatch):
    """Of libraries that this process has."""
    name = "torch.utils.throughput_benchmark"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = [run_ranks(was_imported, 1, tmp_path / str(number), name)[0].result for number in range(2)]
    assert found == [False, True]
    assert not list(tmp_path.rglob("imported-*"))
