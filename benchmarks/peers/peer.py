"""`Peer`: what every tool's file provides, and `PEERS`, the tools by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_memfit.bench.experiment import closest
from lightning_memfit.bench.record import UnsupportedError
from lightning_memfit.extras import is_installed

if TYPE_CHECKING:
    from benchmarks.peers.task import Task
    from benchmarks.peers.watch import Watch

Options = Mapping[str, Any]
"""Options that a row gives a peer in addition to the task, in the peer's own terms."""


@dataclass(frozen=True)
class Peer:
    """A tool other than this package that trains what a row describes."""

    packages: tuple[str, ...]
    """Modules that it needs in addition to torch and transformers."""
    install: str
    """Arguments for pip if they are missing."""
    train: Callable[["Task", Options, "Watch"], None]
    """Trains to the end under a watch. Raises `UnsupportedError` if the tool can't, `ValueError` for wrong options."""

    def require(self) -> None:
        """Check that the packages are installed.

        Raises:
            UnsupportedError: If a package is missing.
        """
        missing = [name for name in self.packages if not is_installed(name)]
        if missing:
            raise UnsupportedError(f"This peer needs {', '.join(missing)}: `pip install {self.install}`.")


# --- the tools that a row can name; importing this file imports none of them ------------------------------------------


PEERS = {
    "torch": "torch by hand",
    "lightning": "plain Lightning",
    "hf_trainer": "HF Trainer",
    "deepspeed": "DeepSpeed by hand",
    "torchao": "torchao",
}
"""Tools by name, in the order of a table's columns."""

_PLACES = {
    "torch": "loops.TORCH",
    "lightning": "plain_lightning.PEER",
    "hf_trainer": "hf_trainer.PEER",
    "deepspeed": "deepspeed_by_hand.PEER",
    "torchao": "loops.TORCHAO",
}


def peer_named(name: str) -> Peer:
    """The tool with a name from `PEERS`.

    Raises:
        ValueError: If there is none with that name.
    """
    if name not in PEERS:
        raise ValueError(f"`peer={name}` is no tool that is known. {closest(name, list(PEERS))}")
    module, attribute = _PLACES[name].split(".")
    peer = getattr(import_module(f"benchmarks.peers.{module}"), attribute)
    assert isinstance(peer, Peer)
    return peer
