"""`PeerRun`: one row trained by a peer, and what was measured."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.peers.peer import Peer, peer_named
from benchmarks.peers.task import Task
from benchmarks.peers.watch import Watch
from lightning_memfit.memory.kind import device_of, hardware_name


class PeerRun:
    """One run of a peer in this process.

    Args:
        folder: Folder with `settings.yaml` and `job.json`; the peer may write there.
    """

    def __init__(self, folder: Path) -> None:
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
        self._peer: Peer = peer_named(job["peer"])
        self._options: dict[str, Any] = job["options"]
        self._settings = settings
        self._folder = folder
        self._device = device_of(settings["trainer"]["accelerator"])
        self._watch = Watch(int(job["warmup_steps"]), self._device)

    def fit(self) -> None:
        """Train the row.

        Raises:
            UnsupportedError: If the peer can't do so here.
            ValueError: If settings or options are wrong.
        """
        self._peer.require()
        try:
            self._peer.train(Task(self._settings, self._folder), self._options, self._watch)
        finally:
            self._watch.close()

    def outcome(self) -> dict[str, Any]:
        """Return everything that was measured, as plain data. Only this package's runs have a prediction."""
        speed = self._watch.clock.speed()
        first, last = self._watch.clock.losses
        return {
            "predicted": None,
            "measured": vars(self._watch.memory()),
            "speed": speed and vars(speed),
            "loss_first": first,
            "loss_last": last,
            "hardware": {
                "device": hardware_name(self._device),
                "threads": torch.get_num_threads(),
            },
        }

    def finish_tracking(self, outcome: dict[str, Any]) -> None:
        """Do nothing: peers are not tracked."""
