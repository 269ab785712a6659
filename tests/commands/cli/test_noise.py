"""What other packages say about themselves isn't shown; all else is."""

import logging
import os
import subprocess
import sys

import pytest

from cli.noise import bars_on_terminals_only, progress_on_stdout, without_noise

_DROPPED = [
    ("torchao", "Failed to load /venv/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: Could not load this library"),
    ("torch.utils._pytree", "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by torch"),
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: No module named"),
    ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import `torchao` Tensor objects. This may affect"),
    ("datasets.packaged_modules.json.json", "Failed to load JSON from file 'data.jsonl' with error ArrowInvalid"),
    ("DeepSpeed", "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it."),
    ("lightning.pytorch.utilities.rank_zero", "\N{ELECTRIC LIGHT BULB} Tip: For seamless cloud logging and experiment"),
]


@pytest.fixture
def records(monkeypatch):
    """What loggers let through, however the packages they belong to have set them up."""
    found = []

    class Collects(logging.Handler):
        def emit(self, record):
            found.append((record.name, record.getMessage()))

    for name in {"torch", *(name for name, _ in _DROPPED)}:
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [Collects()])
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "level", logging.DEBUG)
    return found


def test_only_what_is_named_is_dropped(records):
    kept = [(name, f"Something else: {text}") for name, text in _DROPPED if name != "torch.utils._pytree"]
    kept += [("torch", text) for _, text in _DROPPED]  # the same words of another logger
    kept.append(("torch.utils._pytree", "the node type is deprecated"))
    with without_noise():
        for name, text in [*_DROPPED, *kept]:
            logging.getLogger(name).error("%s", text)
    assert records == kept


def test_the_filters_go_again(records):
    with pytest.raises(RuntimeError), without_noise():
        raise RuntimeError
    for name, text in _DROPPED[:1]:
        logging.getLogger(name).error(text)
    assert len(records) == 1


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
