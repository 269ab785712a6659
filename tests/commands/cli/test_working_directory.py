"""Classes of modules in the working directory, as `python -m` finds them."""

import sys
from pathlib import Path

import pytest

from cli.main import main

_MODULE = "from lightning.pytorch.demos.boring_classes import BoringModel\nclass AudioTagger(BoringModel):\n    pass\n"


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """Ask for the configuration of a class, the way the installed command does: without the working directory."""
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)

    def run(class_path, **files):
        for name, text in files.items():
            Path(f"{name}.py").write_text(text)
        code = main(["fit", f"--model={class_path}", "--print_config"])
        told = capsys.readouterr()
        return code, told.out if code == 0 else told.err

    yield run
    for name in set(sys.modules) - modules:
        if not name.partition(".")[0].startswith(("lightning", "torch", "transformers", "cli")):
            del sys.modules[name]


def test_a_module_of_the_working_directory_is_found(ask, tmp_path):
    code, told = ask("audio_module.AudioTagger", audio_module=_MODULE)
    assert code == 0
    assert "class_path: audio_module.AudioTagger" in told
    assert str(tmp_path) not in sys.path


def test_installed_modules_go_before_it(ask):
    code, told = ask("calendar.AudioTagger", calendar=_MODULE)
    assert code == 2
    assert "there is no class `calendar.AudioTagger`" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero ({}:2)."),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package' ({}:1)."),
        ("from os import nothing\n", "ImportError: cannot import name 'nothing' from 'os'"),
        ("x = 1\ndef f(:\n    pass\n", "SyntaxError: invalid syntax ({0}, line 2)."),
    ],
)
def test_what_its_import_raises_is_told(ask, tmp_path, text, told):
    code, message = ask("broken_module.AudioTagger", broken_module=text)
    assert code == 2
    path = tmp_path / "broken_module.py"
    shown = told.format("broken_module.py") if "{0}" in told else told.format(path)
    assert f"`model`: `broken_module.AudioTagger` can't be imported: {shown}" in message
    assert len(message.splitlines()) == 1


def test_a_module_that_is_nowhere(ask, tmp_path):
    code, message = ask("nowhere_module.AudioTagger")
    assert code == 2
    assert "there is no module `nowhere_module` for the class `nowhere_module.AudioTagger`, " in message
    assert str(tmp_path) in message
