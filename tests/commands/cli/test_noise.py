"""What other packages say about themselves isn't shown; all else is."""

import logging
import os
import subprocess
import sys

import pytest

from cli.noise import bars_on_terminals_only, progress_on_stdout, without_noise

_NOISY = ["torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"]


def test_warnings_of_imports_are_dropped_and_errors_are_not(monkeypatch, capfd):
    loggers = {name: logging.getLogger(name) for name in [*_NOISY, "torch"]}
    for logger in loggers.values():
        monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stderr)])
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "disabled", False)
    with pytest.raises(RuntimeError), without_noise():
        for name, logger in loggers.items():
            logger.warning("%s warns", name)
            logger.error("%s fails", name)
        raise RuntimeError
    loggers["torchao"].warning("afterwards")
    told = [f"{name} fails" for name in _NOISY]
    assert capfd.readouterr().err.splitlines() == [*told, "torch warns", "torch fails", "afterwards"]


def test_a_run_tells_its_progress_on_stdout_and_warns_on_stderr(monkeypatch, capfd):
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    inner = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    for name, value in {"disabled": False, "level": logging.NOTSET, "propagate": True, "handlers": []}.items():
        monkeypatch.setattr(inner, name, value)
    logging.Logger.manager._clear_cache()  # of which levels are on
    plain = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logger, "handlers", [plain])
    monkeypatch.setattr(logger, "propagate", False)
    with progress_on_stdout():
        logger.info("Seed set to 42")
        inner.warning("careful")
    logger.info("afterwards")
    assert capfd.readouterr() == ("Seed set to 42\n", "careful\nafterwards\n")
    assert logger.handlers == [plain]


def test_a_logger_of_the_users_is_left_alone(monkeypatch, capfd, tmp_path):
    logger = logging.getLogger("lightning.fabric")
    monkeypatch.setattr(logger, "handlers", [logging.FileHandler(tmp_path / "log.txt")])
    monkeypatch.setattr(logger, "propagate", False)
    with progress_on_stdout():
        logger.warning("to a file")
    logger.handlers[0].close()
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "log.txt").read_text() == "to a file\n"


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
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.nightly
def test_weights_show_no_bar_where_nobody_looks(tmp_path):
    """In a process of their own: transformers decides about its bars as it is imported."""
    program = (
        "import os, sys\n"
        "ends = {'bos_token_id': 0, 'eos_token_id': 0}\n"
        "from cli.noise import bars_on_terminals_only, without_noise\n"
        "with bars_on_terminals_only(), without_noise():\n"
        "    from transformers import GPT2Config, GPT2LMHeadModel\n"
        "    made = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1, **ends))\n"
        "    made.save_pretrained(sys.argv[1])\n"
        "    GPT2LMHeadModel.from_pretrained(sys.argv[1])\n"
        "assert 'HF_HUB_DISABLE_PROGRESS_BARS' not in os.environ\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("decided", "terminal"), [("0", False), (None, True)])
def test_bars_stay_where_they_are_wanted(monkeypatch, decided, terminal):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    if decided is not None:
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", decided)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with bars_on_terminals_only():
        assert os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == decided
