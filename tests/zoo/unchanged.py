"""What a trial step must leave as it was: the process, its files and descriptors, globals, and the module."""

import atexit
import contextlib
import os
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.zoo import side_effects, surroundings


def described(module: Any) -> dict[str, Any]:
    """Everything that a trial step could change, by name."""
    found = {f"setting {name}": value for name, value in surroundings.process().items()}
    found |= {f"global {name}": value for name, value in surroundings.of_globals().items()}
    found |= {f"attribute {name}": surroundings.described(value) for name, value in vars(module).items()}
    numbers = np.random.get_state()  # noqa: NPY002
    return found | {
        "class": sorted(vars(type(module))),
        "weights": surroundings.described(list(module.state_dict().items())),
        "files": side_effects.contents(Path.cwd()),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
        "shared memory": Path("/dev/shm/memfit_test_seal").exists(),
        "descriptors": _descriptors(),
        "queue": side_effects.WAITING.qsize(),
        "pipe": [one.poll() for one in side_effects.innermost(side_effects.connections)],
        "functions at exit": atexit._ncallbacks(),
        "threads": threading.active_count(),
        "child processes": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "random numbers": (random.getstate(), numbers[1].tolist(), numbers[2:], torch.get_rng_state().tolist()),
        "relu": id(torch.nn.functional.relu),
        "Linear": {name: id(value) for name, value in vars(torch.nn.Linear).items() if name[:2] != "__"},
    }


def _descriptors() -> dict[int, tuple[str, int]]:
    """What each open descriptor is, and where reading goes on."""
    found = {}
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # that of the listing itself
            target, place = os.readlink(f"/proc/self/fd/{number}"), -1
            with contextlib.suppress(OSError):
                place = os.lseek(number, 0, os.SEEK_CUR) if target.startswith("/") and "dev" not in target else -1
            found[number] = (target, place)
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """`unchanged`, or the names of what differs."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return f"changed: {' and '.join(names)}" if names else "unchanged"
