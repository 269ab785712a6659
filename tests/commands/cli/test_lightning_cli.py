import pytest
import yaml

from cli.lightning_cli import MemFitCLI
from cli.main import main

MODEL = {
    "class_path": "lightning_memfit.models.CausalLM",
    "init_args": {"config": {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 258}},
}
DATA = {"class_path": "lightning_memfit.data.StandardLibraryText", "init_args": {"max_files": 10}}
CHECKPOINT = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"monitr": "x"}}


@pytest.fixture
def write(tmp_path):
    def write_file(name="a.yaml", **content):
        (tmp_path / name).write_text(yaml.safe_dump({"model": MODEL, "data": DATA, **content}))
        return str(tmp_path / name)

    return write_file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"trainer": {"max_stepz": 3}}, "no option `trainer.max_stepz`. Closest: trainer.max_steps"),
        ({"trainerr": {"max_steps": 3}}, "no option `trainerr.max_steps`. Closest: trainer."),
        (
            {"model": {**MODEL, "init_args": {"learning_rat": 1}}},
            "`model`: CausalLM has no argument `learning_rat`. Closest: learning_rate",
        ),
        (
            {"data": {**DATA, "init_args": {"sequence_lenght": 1}}},
            "`data`: StandardLibraryText has no argument `sequence_lenght`. Closest: sequence_length",
        ),
        (
            {"trainer": {"callbacks": [CHECKPOINT]}},
            "`trainer.callbacks`: ModelCheckpoint has no argument `monitr`. Closest: monitor",
        ),
        (
            {"model": {"class_path": "lightning_memfit.models.CausallM"}},
            "`model`: there is no class `lightning_memfit.models.CausallM`. Closest: lightning_memfit.models.",
        ),
        (
            {"trainer": {"callbacks": [{"class_path": "ModelCheckpointt"}]}},
            "`trainer.callbacks`: there is no class `ModelCheckpointt`. Closest: lightning.pytorch.callbacks.",
        ),
        ({"trainer": {"max_steps": "many"}}, "`trainer.max_steps=many` must be a whole number"),
    ],
)
def test_mistakes_in_a_file_name_the_closest(write, capsys, content, message):
    assert main(["fit", "--config", write(**content)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("memfit: error: ")
    assert message in error
    assert len(error.splitlines()) <= 2


def test_print_config_composes_files_and_appends_callbacks(write, tmp_path, capsys):
    first = write(trainer={"max_steps": 3, "callbacks": [{"class_path": "LearningRateMonitor"}]})
    (tmp_path / "b.yaml").write_text(
        yaml.safe_dump({"trainer": {"max_steps": 5, "callbacks+": [{"class_path": "RichProgressBar"}]}})
    )
    arguments = ["fit", "--config", first, "--config", str(tmp_path / "b.yaml"), "--config", "fragments/memory_limit"]
    assert main([*arguments, "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["max_steps"] == 5
    names = [callback["class_path"].rpartition(".")[2] for callback in printed["trainer"]["callbacks"]]
    assert names == ["LearningRateMonitor", "RichProgressBar", "MemoryLimit"]


@pytest.mark.parametrize("name", ["trainer.yaml", "trainer.cfg", "trainer"])
def test_a_file_within_a_recipe_may_use_our_names(write, tmp_path, name):
    """Strategies by name and bare class names, wherever they are written."""
    content = {
        "strategy": "memfit_ddp",
        "accelerator": "cpu",
        "devices": 1,
        "callbacks": [{"class_path": "MicroBatching"}],
    }
    (tmp_path / name).write_text(yaml.safe_dump(content))
    cli = MemFitCLI(["--config", write(trainer=str(tmp_path / name))], run=False, save_config_callback=None)
    assert type(cli.trainer.strategy).__name__ == "DataParallelStrategy"
    assert "MicroBatching" in {type(callback).__name__ for callback in cli.trainer.callbacks}
