"""The Hugging Face hub, asked for as little as possible, and not at all where it can't be reached.

Importing this module imports nothing but the standard library.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = {"1", "on", "yes", "true"}
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_offline() -> bool:
    """Whether the user has said that the hub is not to be asked."""
    return any(os.environ.get(name, "").lower() in _TRUE for name in _OFFLINE)


@functools.lru_cache(maxsize=1)
def is_reachable(timeout_s: float = 4.0) -> bool:
    """Whether a connection to the hub can be opened; behind a proxy that is taken for granted. Asked once a process.

    Args:
        timeout_s: Seconds for all of it, the look-up of the hub's address included, which has no limit of its own.
    """
    if set(getproxies()) - {"no"}:
        return True
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    answers: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout_s).close()
        except OSError:
            return
        answers.append(True)

    asking = threading.Thread(target=connect, name="memfit-hub", daemon=True)
    asking.start()
    asking.join(timeout_s)
    return bool(answers)


@contextmanager
def asked_once() -> Iterator[None]:
    """Look for a network before the first request to the hub, whoever makes it, instead of retrying for 45 s.

    Without one, that request and all later ones end in the error that they have where `HF_HUB_OFFLINE` is set, which
    the libraries of Hugging Face answer from their caches as far as these go.
    """
    if is_offline():
        yield
        return
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    def refuse(request: Any) -> None:
        if not is_reachable():
            constants.HF_HUB_OFFLINE = True  # else they ask again for each file of a model, and wait in between
            raise OfflineModeIsEnabled(
                f"Cannot reach {request.url.host}: there is no network. Set `HF_HUB_OFFLINE=1` not to ask"
            )

    session = get_session()  # which all of their libraries share
    hooks, was_offline = session.event_hooks, constants.HF_HUB_OFFLINE
    session.event_hooks = {**hooks, "request": [refuse, *hooks["request"]]}
    try:
        yield
    finally:
        session.event_hooks, constants.HF_HUB_OFFLINE = hooks, was_offline


def read_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a model of the hub, from the cache or, that file alone, from the hub.

    Args:
        name: `owner/name`.

    Raises:
        LookupError: If there is none, with the reason.
    """
    if _NAME.fullmatch(name) is None:
        raise LookupError("it is no name of the hub, which are written owner/name")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        if is_offline():
            raise LookupError("it is not in the hub's cache, and HF_HUB_OFFLINE is set")
        if not is_reachable():
            raise LookupError("it is not in the hub's cache, and the hub can't be reached")
        try:
            found = hf_hub_download(name, "config.json", etag_timeout=5)
        except (OSError, ValueError) as error:
            raise LookupError(str(error).strip().splitlines()[0]) from error
    try:
        config: dict[str, Any] = json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LookupError(f"its config.json can't be read: {error}") from error
    return config
