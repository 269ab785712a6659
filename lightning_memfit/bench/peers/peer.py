"""`Peer`: what every tool's file gives, and the error that says what a tool can't do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_memfit.bench.peers.task import Task
    from lightning_memfit.bench.peers.watch import Watch

Options = Mapping[str, Any]
"""What a row tells a peer beside the task, in the peer's own words."""


class UnsupportedError(Exception):
    """The tool can't do on this machine what its row asks for."""


@dataclass(frozen=True)
class Peer:
    """A tool that trains by itself what a row describes."""

    packages: tuple[str, ...]
    """Modules that it needs beside torch and transformers."""
    install: str
    """What to give to pip when they are missing."""
    train: Callable[["Task", Options, "Watch"], None]
    """Train to the end, watched. Raises `UnsupportedError` where the tool can't, `ValueError` for wrong options."""

    def require(self) -> None:
        """Check the packages.

        Raises:
            UnsupportedError: If one is missing.
        """
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise UnsupportedError(f"This peer needs {', '.join(missing)}: `pip install {self.install}`.")


def check_options(peer: str, options: Options, known: tuple[str, ...]) -> None:
    """Refuse options that nobody would read.

    Raises:
        ValueError: If an option is unknown.
    """
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"`options.{unknown[0]}` is nothing that peer {peer!r} knows. It takes {', '.join(known)}.")


# `PEERS`: the tools that a row can name. Importing this imports none of them.


PEERS = {
    "lightning": "plain Lightning",
    "hf_trainer": "HF Trainer",
    "deepspeed": "DeepSpeed by hand",
    "torchao": "torchao",
}
"""Names and headings, in the order of a table's columns."""

_MODULES = {
    "lightning": "plain_lightning",
    "hf_trainer": "hf_trainer",
    "deepspeed": "deepspeed_by_hand",
    "torchao": "torchao_loop",
}


def peer_named(name: str) -> Peer:
    """The tool of a name in `PEERS`."""
    peer = import_module(f"lightning_memfit.bench.peers.{_MODULES[name]}").PEER
    assert isinstance(peer, Peer)
    return peer
