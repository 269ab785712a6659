import pytest

from cli.main import main
from cli.recipe_files import FOLDER, available, resolve, resolve_arguments


def test_every_recipe_is_listed_with_what_it_is_for(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()  # a table of tasks and memory follows
    assert [line.split()[0] for line in lines] == list(available())
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml"])
def test_found_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(name) == str(FOLDER / "quickstart.yaml")


def test_arguments():
    resolved = resolve_arguments(["fit", "-c", "quickstart", "--config=fragments/wandb", "--model.x", "quickstart"])
    assert resolved == [
        "fit",
        "-c",
        str(FOLDER / "quickstart.yaml"),
        f"--config={FOLDER / 'fragments/wandb.yaml'}",
        "--model.x",
        "quickstart",
    ]


def test_copy_never_overwrites(tmp_path, capsys):
    assert main(["recipes", "copy", "quickstart", str(tmp_path)]) == 0
    copied = tmp_path / "quickstart.yaml"
    assert capsys.readouterr().out.strip() == str(copied)
    copied.write_text("mine")
    assert main(["recipes", "copy", "quickstart", str(tmp_path)]) == 2
    assert copied.read_text() == "mine"


def test_the_trial_of_gpt2xl_without_network_trains(tmp_path, monkeypatch, capsys):
    """As the recipe itself advertises it; it was refused for its global batch size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["fit", "--config", "gpt2xl", "--config", "quick/gpt2xl"]) == 0
    assert "Run report: 2 optimizer steps" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs" / "gpt2xl").iterdir()] == ["version_0"]
