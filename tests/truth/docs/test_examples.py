"""What the pages tell users to type works."""

import contextlib
import inspect
import io
import re
import shlex
from functools import lru_cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from tests.helpers.modules import Layers

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_WHOLE = "tutorial"
"""The page whose blocks follow from each other; test_site.py runs it."""


def blocks(*languages):
    found = []
    for page in PAGES:
        for number, match in enumerate(re.finditer(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)):
            if match[1] in languages:
                found.append(pytest.param(page, match[2], id=f"{page.stem}-{number}"))
    return found


def commands():
    """Every `memfit ...` line, continued lines joined and comments off."""
    found = []
    for block in blocks("", "bash"):
        page, text = block.values
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if line.startswith("memfit ") else []
            if words:
                found.append(pytest.param(words[1:], id=f"{page.stem}-{' '.join(words[1:])[:60]}"))
    return found


@pytest.fixture
def namespace(monkeypatch, tmp_path):
    """What a reader has before an example: a module, its data and Lightning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_NVME_PATH", str(tmp_path))
    import lightning_memfit

    def trainer(**arguments):
        if arguments.get("strategy"):
            pytest.importorskip("deepspeed")
        return L.Trainer(**({"accelerator": "cpu", "logger": False, "enable_checkpointing": False} | arguments))

    monkeypatch.setattr(L, "Trainer", partial(L.Trainer, accelerator="cpu", logger=False, enable_checkpointing=False))
    return {
        "L": L,
        "Trainer": trainer,
        "module": Layers(4, 2),
        "datamodule": L.LightningDataModule.from_datasets(TensorDataset(torch.randn(256, 4)), batch_size=256),
        "MicroBatching": lightning_memfit.MicroBatching,
        "MemoryMonitor": lightning_memfit.MemoryMonitor,
    }


@pytest.mark.parametrize(("page", "text"), [block for block in blocks("python") if not block.id.startswith(RUN_WHOLE)])
def test_python_runs(namespace, page, text):
    if "torchao" in text:
        pytest.importorskip("torchao")
    exec(compile(text, str(page), "exec"), namespace)


@pytest.mark.parametrize(("page", "text"), blocks("diff"))
def test_the_added_line_is_all_it_takes(namespace, page, text):
    code = "\n".join(line[1:] for line in text.splitlines())
    exec(compile(code, str(page), "exec"), namespace)
    assert namespace["trainer"].global_step == 3


@pytest.mark.parametrize("words", commands())
def test_options_exist(words):
    from cli.main import COMMANDS

    command, *options = words
    assert command in COMMANDS
    names = [word.partition("=")[0] for word in options if word.startswith("--")]
    if COMMANDS[command][0] == "lightning_cli":
        names = [name for name in names if not re.match(r"--(model|data|trainer)\.", name)]
        assert set(names) <= {"--config", "--ckpt_path", "--print_config"}
        return
    overrides = {name for name in names if "." in name}  # of the recipe, as `memfit fit` takes them
    assert set(names) - overrides <= options_of(command)


@lru_cache
def options_of(command):
    from cli.main import main

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[a-z][a-z_-]*", shown.getvalue()))


READERS_OWN = {"mine.yaml", "plan.yaml"}


@pytest.mark.parametrize("words", commands())
def test_named_recipes_exist(words):
    from cli.recipe_files import resolve

    named = [after for word, after in pairwise(words) if word == "--config"]
    for name in {name for name in named if name not in READERS_OWN}:
        assert (ROOT / name).is_file() or Path(resolve(name)).is_file()


def class_paths(value):
    if isinstance(value, dict):
        if "class_path" in value:
            yield value["class_path"], value.get("init_args", {})
        for child in value.values():
            yield from class_paths(child)
    elif isinstance(value, list):
        for child in value:
            yield from class_paths(child)


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_named_classes_and_arguments_exist(page, text):
    for path, arguments in class_paths(yaml.safe_load(text.replace("{...}", "{}"))):
        if path.startswith("my_project."):
            continue
        folder, _, name = path.rpartition(".")
        kinds = [one for one in inspect.getmro(getattr(import_module(folder), name)) if "__init__" in vars(one)]
        known: set[str] = set()
        for kind in kinds:  # a constructor may hand arguments on to that of its base
            parameters = inspect.signature(kind.__init__).parameters
            known |= set(parameters)
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
        assert set(arguments) <= known, path
