"""The hub is not asked where it can't be reached."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import get_session
from huggingface_hub.errors import OfflineModeIsEnabled

from lightning_memfit import hub

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nobody_has_said_offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    forget = hub.is_reachable.cache_clear
    forget()
    yield
    forget()


def test_a_request_is_refused_at_once_and_the_client_is_left_as_it_was(monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "is_reachable", lambda: bool(asked.append(1)))
    before = get_session().event_hooks["request"]
    with hub.asked_once():
        assert not asked
        with pytest.raises(OfflineModeIsEnabled, match=r"Cannot reach hub.invalid: there is no network"):
            get_session().get("https://hub.invalid/config.json")
        assert asked
    assert get_session().event_hooks["request"] == before


def test_nobody_looks_for_a_network_where_the_user_has_said_that_there_is_none(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = get_session().event_hooks["request"]
    with hub.asked_once():
        assert get_session().event_hooks["request"] == before


def test_a_slow_name_server_does_not_hold_up(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    waiting = threading.Event()
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_: waiting.wait(30) and hub.socket.socket())
    started = time.monotonic()
    assert not hub.is_reachable(0.1)
    assert time.monotonic() - started < 20
    waiting.set()


@pytest.mark.nightly
def test_training_a_model_of_the_hub_without_a_network_is_one_message(tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.upper().endswith("_PROXY") and "OFFLINE" not in k}
    environment = {**kept, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cli", "fit", "--config", str(ROOT / "recipes" / "gpt2xl.yaml")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    told = done.stderr.strip().splitlines()
    assert told[-1].startswith("memfit: error: `")
    assert sum("error" in line.lower() for line in told) == 1
    assert "Retrying" not in done.stderr
    for words in ("openai-community/gpt2-xl", "nor could it be fetched", "Give a local folder"):
        assert words in done.stderr
