"""`PEERS`: the tools that a row can name. Importing this imports none of them."""

from importlib import import_module

from lightning_memfit.bench.peers.peer import Peer

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
