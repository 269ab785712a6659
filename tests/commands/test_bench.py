"""`memfit bench` and `memfit scale` as users type them, on a small module, in real processes."""

import json
import os
from pathlib import Path

import pytest
import yaml

from cli.main import main
from cli.scale import build_parser
from tests.helpers.wandb_files import read_run

BASE = {
    "seed_everything": 1,
    "model": {"class_path": "tests.helpers.modules.Toy"},
    "data": {
        "class_path": "lightning_memfit.data.RandomTokens",
        "init_args": {"num_samples": 32, "sequence_length": 8, "batch_size": 4, "vocab_size": 50, "num_labels": 2},
    },
}
LIMIT = {"class_path": "lightning_memfit.device.limit.MemoryLimit", "init_args": {"limit": "100KiB"}}
WIDE = {"model": {"init_args": {"width": 32}}, "data": {"init_args": {"batch_size": 32}}}
EXPERIMENT = {
    "title": "Toys",
    "measure": {"warmup_steps": 2, "timed_steps": 3, "timeout_s": 120},
    "base": BASE,
    "rows": {
        "plain": {"reference": {"samples_per_second": 1.0}},
        "limited": {"layers": [WIDE, {"trainer": {"callbacks+": [LIMIT]}}]},
    },
}


def write(path: Path, content: dict) -> str:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


@pytest.mark.nightly
def test_bench_writes_a_record_per_row_and_keeps_them(tmp_path, capsys):
    arguments = ["bench", "--experiment", write(tmp_path / "toys.yaml", EXPERIMENT), "--folder", str(tmp_path / "out")]
    assert main([*arguments, "--json", "--note", "a test"]) == 0
    output = capsys.readouterr()
    plain, limited = json.loads(output.out)
    assert json.loads((tmp_path / "out" / "toys_cpu_full" / "plain.json").read_text()) == plain
    assert plain["status"] == "ok"
    assert plain["speed"]["timed_steps"] == 3
    assert plain["predicted"]["allocated_bytes"] == pytest.approx(plain["measured"]["allocated_bytes"], rel=0.03)
    assert plain["loss_last"] is not None
    assert plain["hardware"]["threads"] == 1
    assert plain["hardware"]["notes"] == "a test"
    assert f"--folder {tmp_path / 'out'}" in plain["command"]
    assert limited["status"] == "out_of_memory"
    assert "OutOfMemory" in limited["error"]["type"]
    assert limited["predicted"]["allocated_bytes"] > 100 * 1024
    table = (tmp_path / "out" / "toys_cpu_full" / "table.md").read_text()
    assert "out of memory" in table

    assert main(arguments) == 0
    told = [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()[-2:]]
    assert told == ["plain: ok (kept)", "limited: out of memory (kept)"]


@pytest.mark.nightly
def test_scale_over_two_processes_tracked_offline_and_reported(tmp_path, capsys, monkeypatch):
    pytest.importorskip("wandb")
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sweep = {
        "title": "Toys",
        "measure": {"warmup_steps": 2, "timed_steps": 3, "timeout_s": 120},
        "base": BASE,
        "matrix": {"devices": [2], "technique": {"none": []}},
    }
    config = write(tmp_path / "toys.yaml", sweep)
    assert main(["scale", "--config", config, "--folder", str(tmp_path / "out")]) == 0
    folder = tmp_path / "out" / "toys_cpu"
    none = json.loads((folder / "p2_none.json").read_text())
    assert none["point"] == {"devices": 2, "technique": "none"}
    assert none["predicted"]["by_category"]["communication"] == none["measured"]["by_category"]["communication"] > 0
    assert none["predicted"]["allocated_bytes"] == pytest.approx(none["measured"]["allocated_bytes"], rel=0.03)
    assert "report.md" in capsys.readouterr().out
    assert f"--folder {tmp_path / 'out'} --report-only" in (folder / "report.md").read_text()

    [run] = [read_run(path) for path in (folder / "wandb").glob("offline-run-*")]
    assert (run["name"], run["group"]) == ("p2_none", "toys-cpu")
    assert run["config"]["point"] == none["point"]
    assert run["config"]["settings"]["trainer"]["devices"] == 2
    assert run["config"]["predicted"]["allocated_bytes"] == none["predicted"]["allocated_bytes"]
    assert run["summary"]["measured/allocated_bytes"] == none["measured"]["allocated_bytes"]
    assert run["summary"]["prediction_error"] == pytest.approx(0, abs=0.03)
    assert len(run["history"]) == 3
    assert run["system"]


def test_a_sweep_for_agents_names_every_point_and_a_command_that_measures_it(tmp_path, capsys):
    file, config = tmp_path / "sweep.yaml", "benchmarks/experiments/sweeps/scaling.yaml"
    options = ["scale", "--config", config, "--folder", str(tmp_path / "runs"), "--sweep", str(file)]
    assert main(options) == 0
    assert "wandb sweep --project lightning-memfit" in capsys.readouterr().out
    document = yaml.safe_load(file.read_text())
    points = document["parameters"]["only"]["values"]
    assert len(points) == 12
    *command, macro = document["command"]
    assert (command[:2], macro) == (["memfit", "scale"], "${args}")
    asked = build_parser().parse_args([*command[2:], f"--only={points[0]}"])  # as an agent calls it
    assert (asked.config, asked.only, asked.wandb) == (config, [points[0]], "online")
    assert not (tmp_path / "runs").exists()
    assert main(options) == 2
    assert "can't be written: File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--experiment", "nope"], "`--experiment nope` is neither a file nor the name of one. Closest: "),
        (
            ["bench", "--experiment", "bert_large", "--scale", "tiny"],
            "`--scale tiny`: bert_large.yaml has no such scale",
        ),
        (["bench", "--experiment", "bert_large", "--only", "nope"], "`--only nope`: there is no such row"),
        (["scale", "--config", "nope.yaml"], "`--config nope.yaml` is neither a file nor the name of one. Closest: "),
    ],
)
def test_mistakes_are_explained(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--experiment", "bert_large", "--device", "cuda"]) == 2
    assert "`--device cuda`: torch" in capsys.readouterr().err
