"""Commands say nothing on stderr that isn't about the user's run."""

import logging
import subprocess
import sys

import pytest

from cli.output import without_noise


def test_known_noise_is_dropped_and_nothing_else(caplog):
    with without_noise():
        logging.getLogger("torchao").warning("Failed to load /a/b.so: Could not load this library: /a/b.so")
        logging.getLogger("torchao").warning("something else")
        logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass and is now natively supported", int)
    assert [record.getMessage() for record in caplog.records] == ["something else"]
    logging.getLogger("torchao").warning("Failed to load /a/b.so: afterwards")
    assert len(caplog.records) == 2


@pytest.mark.slow
def test_stderr_is_empty_on_success(tmp_path, monkeypatch):
    """It had four lines of torchao's and torch's, where torchao is installed."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    program = (
        "from lightning_memfit.cli.main import main\n"
        "assert main(['estimate', '--config', 'quickstart', '--device', '12GiB']) == 0\n"
        "assert main(['estimate', '--model', 'gpt2', '--sequence-length', '64', '--device', '12GiB']) == 0\n"
        "assert main(['recipes']) == 0\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.splitlines() == []
    assert "Next: memfit plan --config quickstart --device 12GiB" in finished.stdout
