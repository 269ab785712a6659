"""`RankWatch`: when one rank of a run fails, all of them end, soon and with its name and message.

A rank that fails outside of what ranks agree on leaves the others waiting in a collective. With gloo they get an error
when its process has ended, which says "connection closed by peer" and nothing more; with NCCL they wait until the
timeout. So a rank that fails leaves word in the store that the ranks have met in. The others look there when a
collective fails, and a thread of each looks there now and then: if its own rank doesn't end by itself, it ends it.
"""

import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import distributed

from lightning_memfit.memory.collectives import store_under
from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.consensus import PeerFailed

POLL_SECONDS = 1.0
GRACE_SECONDS = 20.0
"""How long a rank may take to end by itself after another one has failed."""
_PATIENCE_SECONDS = 6.0  # for word of what a failed collective was due to
_COLLECTIVE = re.compile(r"gloo|nccl|process ?group|Connection (?:closed|reset)|Broken pipe|TCPStore|watchdog", re.I)
_FAILED = "failed"
_numbers = iter(range(sys.maxsize))
_watches: "weakref.WeakKeyDictionary[Strategy, RankWatch]" = weakref.WeakKeyDictionary()


def watch_ranks(strategy: Strategy) -> "RankWatch | None":
    """Let the ranks of a run tell each other of their end, from now on until the strategy is torn down.

    All ranks call it at the same point of the program, once their process group is there. Strategies and callbacks may
    each call it: a run has one watch.

    Args:
        strategy: The strategy of the run.

    Returns:
        The watch; None if there is one rank, or the ranks of a trace, which are none.
    """
    is_alone = not distributed.is_initialized() or distributed.get_world_size() == 1
    if is_alone or distributed.get_backend() == "fake":
        return None
    if strategy not in _watches:
        _watches[strategy] = watch = RankWatch(distributed.get_rank(), distributed.get_world_size())

        def explain(inner: Callable[[BaseException], None], exception: BaseException) -> None:
            watch.explain(exception)
            inner(exception)

        def close(inner: Callable[[], None]) -> None:
            for unwrap in layers:
                unwrap()
            _watches.pop(strategy, None)
            watch.close()
            inner()

        layers = [wrap_method(strategy, "on_exception", explain), wrap_method(strategy, "teardown", close)]
    return _watches[strategy]


class RankWatch:
    """Tells the ranks of a run of each other's end, until it is closed.

    All ranks construct it at the same point of the program. Word that a rank has failed is kept once, for the first
    one. A process that ends without a word (killed, out of host memory) is found missing by the ranks on its machine.

    Args:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        store = store_under(f"memfit/watch/{next(_numbers)}")
        # A connection of its own: one that waits for something keeps everybody else from using it.
        self._store: Any = store.clone() if hasattr(store, "clone") else store
        self._neighbours: dict[int, int] = {}
        self._seen: dict[str, Any] | None = None
        self._explained: tuple[BaseException, bool] | None = None
        self._ended = threading.Event()
        self._store.set(f"here/{rank}", json.dumps([_machine(), os.getpid()]))
        self._thread = threading.Thread(target=self._look_around, name="memfit-rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; from now on this rank may end whenever it likes.

        The one that usually keeps the store waits a little for the others to leave, or to see who has failed.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(Exception):  # the store is gone with the rank that kept it
            self._store.set(f"left/{self._rank}", "1")
            begin = time.monotonic()
            others = [f"left/{rank}" for rank in range(1, self._world_size)]
            while self._rank == 0 and not self._store.check(others):
                patience = _PATIENCE_SECONDS if self._word() is None else 2 * POLL_SECONDS
                if time.monotonic() - begin > patience:
                    return
                time.sleep(0.01)

    def explain(self, error: BaseException) -> bool:
        """Take note of an error that ends this rank: it is the first one, or due to another rank's.

        In the latter case the error is given the other rank's number and message, once.

        Returns:
            Whether it is this rank's own.
        """
        if isinstance(error, PeerFailed):
            return False
        if self._ended.is_set():
            return True
        if self._explained is None or self._explained[0] is not error:
            self._explained = (error, self._is_own(error))
        return self._explained[1]

    def _is_own(self, error: BaseException) -> bool:
        is_collective = _is_collective(error)
        try:
            word = self._seen or self._word() or (self._await_word() if is_collective else None)
            if word is None:
                word = self._leave_word(self._rank, f"{type(error).__name__}: {error}")
        except Exception:  # without the store nobody has left word
            word = self._seen or {"rank": 0, "text": "its process, which kept the store that ranks meet in, has ended"}
        is_own = not is_collective or word["rank"] == self._rank
        if not is_own:
            error.args = (f"{_said(word)}\nRank {self._rank} stops, too: {error}", *error.args[1:])
        return is_own

    # --- words ------------------------------------------------------------------------------------------------------

    def _word(self) -> dict[str, Any] | None:
        """Which rank has failed first, and with what; None if none has."""
        if not self._store.check([_FAILED]):
            return None
        word: dict[str, Any] = json.loads(self._store.get(_FAILED))
        return word

    def _leave_word(self, rank: int, text: str) -> dict[str, Any]:
        """Leave word that a rank has failed, and return the first one that was left."""
        word = json.dumps({"rank": rank, "text": text})
        first: dict[str, Any] = json.loads(self._store.compare_set(_FAILED, "", word))
        return first

    def _await_word(self) -> dict[str, Any] | None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < until:
            word = self._word() or self._word_of_missing()
            if word is not None:
                return word
            time.sleep(0.05)
        return None

    def _word_of_missing(self) -> dict[str, Any] | None:
        """Leave word of a rank on this machine whose process is not there any more."""
        for rank, process in self._find_neighbours():
            if not _is_alive(process) and not self._store.check([f"left/{rank}"]):
                return self._word() or self._leave_word(rank, "its process has ended without an error (killed?)")
        return None

    def _find_neighbours(self) -> Iterator[tuple[int, int]]:
        """The other ranks on this machine and their processes."""
        for rank in range(self._world_size):
            if rank != self._rank and rank not in self._neighbours and self._store.check([f"here/{rank}"]):
                machine, process = json.loads(self._store.get(f"here/{rank}"))
                self._neighbours[rank] = process if machine == _machine() else 0
        yield from ((rank, process) for rank, process in self._neighbours.items() if process)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Wait for word of another rank, and then for the end of this one."""
        word: dict[str, Any] | None = None
        while word is None:
            if self._ended.wait(POLL_SECONDS):
                return
            try:
                word = self._seen = self._word() or self._word_of_missing()
            except Exception:
                word = {"rank": 0, "text": "its process, which kept the store that ranks meet in, has ended"}
        if word["rank"] == self._rank or self._ended.wait(GRACE_SECONDS):
            return
        print(
            f"{_said(word)}\nRank {self._rank} was still waiting for it {GRACE_SECONDS:.0f} s later and is ended.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _said(word: dict[str, Any]) -> str:
    return f"Rank {word['rank']} failed: {word['text']}"


def _is_collective(error: BaseException) -> bool:
    """Whether an error, or one that led to it, comes from a collective or from the store."""
    return any(
        isinstance(one, distributed.DistError) or (isinstance(one, RuntimeError) and bool(_COLLECTIVE.search(str(one))))
        for one in error_chain(error)
    )


def _machine() -> str:
    """What tells machines apart, and containers with process numbers of their own."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names += [os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    return " ".join(names)


def _is_alive(process: int) -> bool:
    """Whether a process on this machine runs; one that has ended and not been waited for doesn't."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or no /proc
        return True
