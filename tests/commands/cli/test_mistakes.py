"""Every mistake that can be seen before training ends in one message and exit code 2."""

import copy

import pytest
import yaml

import cli.fit  # noqa: F401  Lightning's log handler must not hold the stderr of one test
from cli.errors import RunFailedError, readable_errors
from cli.main import main
from tests.fuzz import RECIPE


def callback(name, **arguments):
    return {"class_path": name, "init_args": arguments}


LIMIT, BATCHING = "lightning_memfit.MemoryLimit", "lightning_memfit.MicroBatching"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a command on the recipe with changes; return the exit code and what was written to stderr."""
    monkeypatch.chdir(tmp_path)

    def run_command(command="fit", *options, text=None, init_args=None, **sections):
        recipe = copy.deepcopy(RECIPE)
        recipe["trainer"] = {**recipe["trainer"], "callbacks": None, **sections.pop("trainer", {})}
        for section, arguments in (init_args or {}).items():
            recipe[section]["init_args"] |= arguments
        content = yaml.safe_dump({**recipe, **sections}) if text is None else text
        (tmp_path / "recipe.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        code = main([command, "--config", "recipe.yaml", *options])
        return code, capfd.readouterr().err

    return run_command


HEADS = {"model": {"config": {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 3}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer": {"callbacks": [callback("lightning.pytorch.callbacks.Timer", duration=600)]}},
            "`trainer.callbacks`: `Timer.duration=600` must be text or ",
        ),
        ({"trainer": {"strategy": "none"}}, "`trainer.strategy=none` is not known. Closest: "),
        ({"trainer": {"strategy": "memfit_fsdp3"}}, "`trainer.strategy=memfit_fsdp3` is not known. Closest: memfit_"),
        ({"trainer": {"accelerator": "gpuu"}}, "`trainer.accelerator=gpuu` is not known. Closest: gpu"),
        ({"trainer": {"max_epochs": "two"}}, "`trainer.max_epochs=two` must be a whole number or null."),
        ({"text": "model:\n  class_path: [\n"}, "node content in line 3"),
        ({"trainer": {"devices": [0, 3]}}, "`devices` selected with `CPUAccelerator` should be an int > 0"),
        ({"trainer": {"devices": "two"}}, "`devices` selected with `CPUAccelerator` should be an int > 0"),
        (
            {
                "trainer": {
                    "precision": "bf16-mixed",
                    "plugins": [
                        callback("lightning.pytorch.plugins.MixedPrecision", precision="16-mixed", device="cpu")
                    ],
                }
            },
            "Received both `precision=bf16-mixed` and `plugins=",
        ),
        (
            {"trainer": {"callbacks": [callback(BATCHING)] * 2}},
            "more than one stateful callback of type `MicroBatching`",
        ),
        (
            {"init_args": HEADS},
            "transformers can't build this 'gpt2' model: `embed_dim` must be divisible by num_heads",
        ),
        ({"trainer": {"callbacks": [callback(LIMIT, limit="1e400GiB")]}}, "`limit='1e400GiB'` must be a positive size"),
        # Once accepted in silence:
        ({"trainer": {"accumulate_grad_batches": -1}}, "`trainer.accumulate_grad_batches=-1` must be a number greater"),
        ({"trainer": {"gradient_clip_val": float("nan")}}, "`trainer.gradient_clip_val=nan` must be a number"),
        (
            {"trainer": {"callbacks": [callback(LIMIT, limit="1GiB"), callback(LIMIT, limit="2GiB")]}},
            "There are 2 `MemoryLimit` callbacks (1.00 GiB, 2.00 GiB). Keep one.",
        ),
        (
            {"trainer": {"callbacks": [callback(BATCHING, micro_batch_size=99, global_batch_size=8)]}},
            "`micro_batch_size=99` is more than `global_batch_size=8`",
        ),
        # Once ended in the words of what lies below:
        ({"text": yaml.safe_dump({**RECIPE, "trainer": None})}, "`trainer: null` is no section with arguments"),
        # What can't be read:
        ({"text": b"\xff\xfe\x00m"}, "is no text in UTF-8 (byte 0). Save it as UTF-8."),
        ({"text": "[1, 2]"}, "is no recipe: it must have sections such as"),
        ({"text": "# nothing\n"}, "`--config recipe.yaml` is empty"),
        ({"text": "seed_everything: 1\nseed_everything: 2\n"}, "the key `seed_everything` stands twice (line 2)"),
    ],
)
def test_mistakes(run, tmp_path, changes, message):
    code, told = run(**changes)
    assert code == 2
    assert message in told
    assert told.count("memfit: error: ") == 1
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("fit", ["--trainer.max_epochs", "two"], "`trainer.max_epochs=two` must be a whole number or null."),
        ("fit", ["--trainer.max_stepz=2"], "there is no option `trainer.max_stepz`. Closest: trainer.max_steps"),
        ("fit", ["--trainer.callbacks+=MemoryLimi"], "`trainer.callbacks`: there is no class `MemoryLimi`. Closest: "),
        ("fit", ["--model.learning_rat=1"], "`model`: CausalLM has no argument `learning_rat`. Closest: learning_rate"),
        ("fit", ["--model.learning_rate=fast"], "`model`: `CausalLM.learning_rate=fast` must be a number. Change it."),
        ("estimate", ["--micro-batch", "4"], "there is no option `--micro-batch`. Closest: --micro-batch-size"),
        ("plan", ["--micro-batch", "4"], "there is no option `--micro-batch`. Closest: "),
    ],
)
def test_mistakes_of_options_name_option_and_value(run, command, option, message):
    code, told = run(command, *option)
    assert code == 2
    assert told.startswith(f"memfit: error: {message}")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("command", ["fit", "estimate", "plan"])
def test_plain_mistakes_are_not_said_to_be_untraceable(run, command):
    code, told = run(command, init_args=HEADS, trainer={"callbacks": [callback("lightning_memfit.MemoryPrediction")]})
    assert code == 2
    assert "must be divisible by num_heads" in told
    assert "traced" not in told
    assert "measure" not in told


def test_a_limit_in_which_no_sample_fits_is_one_message(run, tmp_path):
    code, told = run(trainer={"callbacks": [callback(LIMIT, limit="60KiB"), callback(BATCHING)]})
    assert code == 2
    assert "memfit: error: A micro-batch of one sample does not fit" in told
    assert "`MicroBatching(last_resort='recompute')`" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("debug", [False, True])
def test_what_ends_a_run_that_had_begun(run, tmp_path, debug):
    """A run that trained keeps its folder; its error is one line, below the traceback."""
    (tmp_path / "breaking.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Breaks(Callback):\n"
        "    def on_train_batch_end(self, *_):\n"
        "        raise LookupError('of the second kind')\n"
    )
    options = ["--debug"] if debug else []
    trainer = {"callbacks": [callback("breaking.Breaks")]}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        if debug:
            with pytest.raises(LookupError, match="of the second kind"):
                run("fit", *options, trainer=trainer)
            return
        code, told = run("fit", *options, trainer=trainer)
    assert code == 1
    last = told.splitlines()[-1]
    assert "memfit: error: LookupError: of the second kind" in last
    assert "breaking.py:4" in last
    assert "Traceback (most recent call last)" in told
    assert (tmp_path / "runs" / "fuzz" / "version_0" / "config.yaml").exists()


def test_only_the_output_s_pipe_ends_in_silence():
    """A pipe of the run's own that breaks, as a loader's or a tracker's, is an error."""
    with pytest.raises(BrokenPipeError), readable_errors():
        raise BrokenPipeError(32, "Broken pipe")


def test_a_package_that_a_begun_run_misses_is_no_mistake_of_the_command(capsys, monkeypatch):
    monkeypatch.setattr("lightning_memfit.extras.find_spec", lambda name: None)
    missing = ModuleNotFoundError("No module named 'wandb'", name="wandb")
    with readable_errors() as outcome:
        raise missing
    assert outcome.code == 2
    assert 'pip install "lightning-memfit[wandb]"' in capsys.readouterr().err
    with pytest.raises(RunFailedError), readable_errors():
        raise RunFailedError from missing
