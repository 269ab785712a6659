import subprocess
import sys

import pytest

from cli.errors import readable_errors
from cli.main import main


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from cli.main import main; main(['--help']); "
        "sys.exit(bool({'torch', 'lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_no_command_and_unknown_command(capsys):
    assert main([]) == 2
    assert main(["fti"]) == 2
    assert "there is no command 'fti'. Closest: fit" in capsys.readouterr().err


def test_user_mistake_is_one_message(capsys, monkeypatch):
    monkeypatch.delenv("MEMFIT_DEBUG", raising=False)
    assert main(["recipes", "copy", "quikstart"]) == 2
    error = capsys.readouterr().err
    assert "Closest recipes: quickstart" in error
    assert "Traceback" not in error


def test_causes_are_looked_at(capsys):
    def wrapped():
        from lightning_memfit.memory import parse_bytes

        try:
            parse_bytes("abc", "limit")
        except ValueError as error:
            raise RuntimeError("somewhere in the parser") from error

    with readable_errors() as outcome:
        wrapped()
    assert outcome.code == 2
    assert capsys.readouterr().err.startswith("memfit: error: `limit='abc'` is not a size.")


@pytest.mark.nightly
def test_ctrl_c_before_anything_has_begun_is_one_line(tmp_path):
    """Here while modules are imported."""
    program = "import os, signal, sys; sys.meta_path.insert(0, type('Stops', (), {'find_spec': staticmethod("
    program += "lambda name, *_: os.kill(os.getpid(), signal.SIGINT) if name == 'lightning.pytorch' else None)})); "
    program += "signal.signal(signal.SIGINT, signal.default_int_handler); from cli.main import main; "
    program += "sys.exit(main(['fit', '--config', 'quickstart']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "memfit: stopped.\n")


@pytest.mark.parametrize(("given", "code", "said"), [("no data", 1, "no data\n"), (3, 3, ""), (None, 0, "")])
def test_what_a_program_exits_with_is_said(capsys, given, code, said):
    with readable_errors() as outcome:
        sys.exit(given)
    assert (outcome.code, capsys.readouterr().err) == (code, said)


@pytest.mark.parametrize("command", ["fit", "estimate", "plan"])
def test_a_file_that_is_not_there_is_told_before_anything_large_is_imported(command):
    code = (
        f"import sys; from cli.main import main; code = main([{command!r}, '--config', 'nowhere.yaml']); "
        "sys.exit(code if 'torch' not in sys.modules else 1)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("memfit: error: `--config nowhere.yaml` is neither a file nor a recipe.")
