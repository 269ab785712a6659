"""`RankWatch`: what a rank is told of another one's end, and that it doesn't wait for it forever."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed

from lightning_memfit.reliability.rank_watch import RankWatch
from tests.helpers.ranks import run_ranks


def watch() -> RankWatch:
    distributed.init_process_group("gloo")
    return RankWatch(distributed.get_rank(), distributed.get_world_size())


def wait_for_one_that_goes_on() -> None:
    """Rank 1 fails, and its process goes on all the same."""
    watching = watch()
    first: list[int] = [os.getpid()]
    distributed.broadcast_object_list(first, src=0)
    if distributed.get_rank():
        watching.explain(ValueError("no such column"))
        watching.close()
        end = time.monotonic() + 20
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.kill(first[0], 0)
                time.sleep(0.05)
    else:
        distributed.all_reduce(torch.zeros(1))


def test_a_rank_that_waits_for_another_is_ended(tmp_path: Path) -> None:
    patches = {"lightning_memfit.reliability.rank_watch.GRACE_SECONDS": 1.0}
    first, _ = run_ranks(wait_for_one_that_goes_on, 2, tmp_path, seconds=10, patches=patches)
    assert first.code == 1
    assert first.seconds < 8
    assert "Rank 1 failed: ValueError: no such column\nRank 0 was still waiting" in first.output


def own_errors() -> str:
    watching = watch()
    error = KeyError(f"of rank {distributed.get_rank()}")
    watching.explain(error)
    watching.close()
    distributed.barrier()
    return str(error)


def test_an_error_of_its_own_is_left_as_it_is(tmp_path: Path) -> None:
    ended = run_ranks(own_errors, 2, tmp_path)
    assert [one.result for one in ended] == ["'of rank 0'", "'of rank 1'"]


def leave_in_turn() -> bool:
    watching = watch()
    if not distributed.get_rank():
        time.sleep(3)  # the other one has ended by now, as it may
    watching.close()
    return True


def test_a_rank_that_has_left_may_end(tmp_path: Path) -> None:
    watch = "lightning_memfit.reliability.rank_watch"
    patches = {f"{watch}.GRACE_SECONDS": 0.0, f"{watch}.POLL_SECONDS": 0.1}
    assert all(one.result for one in run_ranks(leave_in_turn, 3, tmp_path, patches=patches))


def fail_first() -> str:
    """Of three ranks, the last fails: the first one waits for it, the second one for the first."""
    watching = watch()
    rank = distributed.get_rank()
    try:
        if rank == 2:
            raise ValueError("no such column")
        distributed.all_reduce(torch.zeros(1))
    except Exception as error:
        watching.explain(error)
        watching.close()
        raise
    return ""


def test_all_of_three_name_the_one_that_failed(tmp_path: Path) -> None:
    first, second, third = run_ranks(fail_first, 3, tmp_path, seconds=30)
    assert third.error == "ValueError: no such column"
    for one in (first, second):
        assert "Rank 2 failed: ValueError: no such column" in one.error
        assert one.seconds < 20
