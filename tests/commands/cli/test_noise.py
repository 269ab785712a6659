"""What other packages say about themselves isn't shown; all else is."""

import os
import subprocess
import sys

import pytest

from cli.main import main


@pytest.mark.nightly
def test_clean_commands_leave_stderr_empty(tmp_path):
    """In a process of their own, as most is said when a package is imported."""
    program = (
        "from cli.main import main\n"
        "device = ['--device', '12GiB', '--no-cache']\n"
        "assert main(['estimate', '--model', 'gpt2', '--sequence-length', '64', *device]) == 0\n"
        "assert main(['estimate', '--config', 'quickstart', *device]) == 0\n"
        "assert main(['recipes']) == 0\n"
        "import torchao, bitsandbytes.backends.cpu.ops, sys\n"
        "sys.exit(main(['doctor']) not in (0, 1))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    told = [line for line in ended.stderr.splitlines() if not line.startswith("memfit: estimating")]
    assert (ended.returncode, told) == (0, [])


@pytest.mark.parametrize(("decided", "terminal", "found"), [("0", False, "0"), (None, True, None), (None, False, "1")])
def test_bars_of_weights_are_for_terminals(monkeypatch, decided, terminal, found):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    if decided is not None:
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", decided)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["recipes"]) == 0
    assert os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == found
