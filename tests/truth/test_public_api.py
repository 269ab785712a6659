"""What users import, name in YAML and ask the help for."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.strategies import Strategy

import lightning_memfit
from cli.main import main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_memfit"
# The page on the architecture is for contributors, and names what is not public.
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "architecture.md"})]


def public(base):
    found = [getattr(lightning_memfit, name) for name in lightning_memfit.__all__]
    return [cls for cls in found if inspect.isclass(cls) and issubclass(cls, base)]


def own_classes():
    """Names of all classes that the package defines; by the lines, as parsing it all takes seconds in every worker."""
    return {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.MULTILINE)
    }


def names_in_docs():
    """Classes of ours in code spans and code blocks of the pages, and what they import from us."""
    own, found = own_classes(), set()
    for page in PAGES:
        text = page.read_text()
        code = "\n".join([*re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M), *re.findall(r"`([^`\n]+)`", text)])
        found |= {name for name in re.findall(r"\b[A-Z]\w*[A-Z]\w*", code) if name in own and not name.isupper()}
        found |= {name for name in re.findall(r"\b([A-Z]\w+)\(", code) if name in own}
        found |= set(re.findall(r"\blightning_memfit\.(\w+)\(", code))
        for imported in re.findall(r"from lightning_memfit(?:\.[\w.]+)? import (\([^)]*\)|[^\n]+)", code):
            found |= set(re.findall(r"\w+", imported))
    return sorted(found)


@pytest.mark.parametrize("name", names_in_docs())
def test_what_the_pages_name_can_be_imported(name):
    assert name in lightning_memfit.__all__
    assert getattr(lightning_memfit, name) is not None


def test_the_pages_name_much_of_what_is_public():
    functions, errors = {"estimate_step", "merged_state_dict"}, {"InexactRecomputationError"}
    assert {"Lora", "QuantizedWeights", "MicroBatching", "TF32", *functions, *errors} <= set(names_in_docs())


def test_type_checkers_see_what_is_imported_on_first_use():
    lines = (PACKAGE / "__init__.pyi").read_text().splitlines()
    imported = [line for line in lines if "import" in line]
    assert imported == [f"from {module} import {name} as {name}" for name, module in lightning_memfit._PUBLIC.items()]
    for name in lightning_memfit.__all__:
        assert getattr(lightning_memfit, name) is not None


# --- type checkers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds the package as a wheel does."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, folder / "lightning_memfit", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.nightly
def test_type_checkers_know_every_argument(installed, tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(
        "from lightning_memfit import MicroBatching\n"
        "callback: MicroBatching = MicroBatching(global_batch_size=1)\n"
        "reveal_type(callback.micro_batch_size_in_use)\n"
    )
    (tmp_path / "wrong.py").write_text(
        "import lightning_memfit\n"
        "from lightning_memfit import MicroBatching, NoSuchName\n"
        "MicroBatching(global_batch_sise=1)\n"
        "lightning_memfit.Lora(rank='many')\n"
    )
    # Other packages take mypy a minute, and aren't what is asked about here.
    others = ",".join(
        f"{name}.*" for name in ("torch", "transformers", "numpy", "lightning", "torchmetrics", "deepspeed")
    )
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{others}]\nfollow_imports = skip\n")
    # mypy takes the folders of PYTHONPATH for `site-packages`: errors in them aren't reported, and `py.typed` counts.
    result = subprocess.run(
        [sys.executable, "-m", "mypy", f"--cache-dir={os.devnull}", "right.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=290,
    )
    errors = [line for line in result.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 3, result.stdout + result.stderr
    assert 'has no attribute "NoSuchName"' in errors[0]
    assert 'Unexpected keyword argument "global_batch_sise" for "MicroBatching"' in errors[1]
    assert 'Argument "rank" to "Lora" has incompatible type "str"; expected "int"' in errors[2]
    assert 'right.py:3: note: Revealed type is "int | None"' in result.stdout.replace("builtins.", "")


# --- short names ------------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "MemoryLimit": {"limit": "1GiB"},
    "ReplaceOptimizer": {"name": "adamw_8bit"},
}
TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 258}


@pytest.fixture
def printed(tmp_path, capsys):
    """Configuration of a `fit` as it is parsed from a recipe and options."""

    def parse(*options, **recipe):
        base = {"model": {"class_path": "CausalLM", "init_args": {"config": TINY}}, "data": {"class_path": "TextData"}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**base, **recipe}))
        code = main(["fit", "--config", str(tmp_path / "recipe.yaml"), *options, "--print_config"])
        output = capsys.readouterr()
        assert code == 0, output.err
        return yaml.safe_load(output.out)

    return parse


def test_callbacks_are_named_shortly_in_a_recipe(printed):
    names = [cls.__name__ for cls in public(pl.Callback)]
    callbacks = [{"class_path": name, "init_args": ARGUMENTS.get(name, {})} for name in names]
    parsed = printed(trainer={"callbacks": callbacks})
    assert [spec["class_path"] for spec in parsed["trainer"]["callbacks"]] == [f"lightning_memfit.{n}" for n in names]


@pytest.mark.parametrize("name", [cls.__name__ for cls in public(Strategy)])
def test_strategies_are_named_shortly_in_a_recipe(printed, name):
    parsed = printed(trainer={"strategy": {"class_path": name}})
    assert parsed["trainer"]["strategy"]["class_path"] == f"lightning_memfit.{name}"


def test_callbacks_are_named_shortly_in_options(printed):
    options = ["--trainer.callbacks+=MemoryMonitor", "--trainer.callbacks+=MicroBatching"]
    parsed = printed(*options, "--trainer.callbacks.micro_batch_size=2")
    first, second = parsed["trainer"]["callbacks"]
    assert first["class_path"] == "lightning_memfit.MemoryMonitor"
    assert second["class_path"] == "lightning_memfit.MicroBatching"
    assert second["init_args"]["micro_batch_size"] == 2


class Cut(pl.LightningDataModule):
    """Takes numbers of batches and shares of an epoch, as Lightning's Trainer does."""

    def __init__(self, train: float | int = 0, val: "str | float | int" = 0) -> None:
        super().__init__()


@pytest.mark.parametrize(("written", "meant"), [(1, int), (1.0, float), (50, int), (0.25, float)])
def test_numbers_of_batches_are_no_shares_of_an_epoch(printed, written, meant):
    """`limit_val_batches: 1` is one batch, and 1.0 all of them: whichever type a class, or `typing`, names first."""
    arguments = {"train": written, "val": written}
    parsed = printed(f"--data.train={written}", data={"class_path": f"{__name__}.Cut", "init_args": arguments})
    found = parsed["data"]["init_args"]
    assert found == arguments
    assert {type(value) for value in found.values()} == {meant}


def test_models_and_data_are_named_shortly(printed):
    parsed = printed("--model=SequenceClassifier", "--data=RandomTokens", "--data.sequence_length=8")
    assert parsed["model"]["class_path"] == "lightning_memfit.SequenceClassifier"
    assert parsed["data"]["class_path"] == "lightning_memfit.RandomTokens"


@pytest.mark.parametrize("name", ["MicroBatching", "lightning_memfit.MicroBatching"])
def test_help_of_a_callback(capsys, name):
    assert main(["fit", "--trainer.callbacks.help", name]) == 0
    assert "--trainer.callbacks.global_batch_size" in capsys.readouterr().out


def test_help_without_a_class_lists_ours(capsys):
    assert main(["fit", "--trainer.callbacks.help"]) == 2
    error = capsys.readouterr().err
    assert "`--trainer.callbacks.help` needs the name of a class" in error
    assert not [cls for cls in public(pl.Callback) if cls.__name__ not in error]


def test_help_of_the_command_lists_ours(capsys):
    assert main(["fit", "--help"]) == 0
    shown = re.sub(r"\s+", "", capsys.readouterr().out)
    for base in (pl.Callback, Strategy, pl.LightningModule, pl.LightningDataModule):
        assert not [cls for cls in public(base) if f"lightning_memfit.{cls.__name__}" not in shown]
