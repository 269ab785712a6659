"""The quickstart recipe, cut to a few small steps."""

import csv

import pytest

from cli.main import main

SMALL = [
    "--config=quickstart",
    "--model.config.n_embd=32",
    "--model.config.n_head=2",
    "--data.max_files=30",
    "--data.sequence_length=64",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=12",
    "--trainer.enable_progress_bar=false",
]


def test_learns_and_ends_with_the_table(tmp_path, capfd):
    assert main(["fit", *SMALL, "--model.learning_rate=0.01", f"--trainer.logger.save_dir={tmp_path}"]) == 0
    output = capfd.readouterr().out
    for line in ("Run report: 12 optimizer steps", "peak of live tensors", "optimizer state", "tokens/s", "val_loss"):
        assert line in output
    [checkpoint] = tmp_path.rglob("*.ckpt")
    assert f"Checkpoint: {checkpoint}" in output
    [metrics] = tmp_path.rglob("metrics.csv")
    with metrics.open() as rows:
        lines = list(csv.DictReader(rows))
    losses = [float(row["val_loss"]) for row in lines if row["val_loss"]]
    peaks = [float(lines[-1][f"summary/{name}_peak_gib"]) for name in ("predicted", "measured")]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    assert len(losses) == 2
    assert losses[-1] < min(losses[0], 4.5)  # log(258) = 5.55


def test_budget_smaller_than_the_weights(tmp_path, capfd):
    fragment = tmp_path / "limit.yaml"  # the recipe has a limit of its own, of which a run has one only
    fragment.write_text(
        "trainer: {callbacks: [{class_path: lightning_memfit.device.limit.MemoryLimit, init_args: {limit: 10KiB}}]}\n"
    )
    code = main(["fit", *SMALL, "--config", str(fragment), f"--trainer.logger.save_dir={tmp_path}"])
    assert code == 2
    assert "`limit=10.00 KiB` is smaller than the module's own parameters" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_other_commands_take_the_same_recipe(tmp_path, command):
    assert main([command, *SMALL, f"--trainer.logger.save_dir={tmp_path}"]) == 0
