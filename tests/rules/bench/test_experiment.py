"""Experiments and sweeps are read, resolved and refused; the committed ones are valid."""

from pathlib import Path

import pytest
import yaml

from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.experiment import load_experiment, load_sweep

MINIMAL = {
    "title": "T",
    "base": {"model": {"class_path": "M"}, "trainer": {"precision": "32-true"}},
    "overlays": {"half": {"trainer": {"precision": "bf16-mixed"}}},
    "scales": {"full": {}, "small": {"base": {"data": {"n": 1}}, "measure": {"timed_steps": 2}}},
    "rows": {
        "plain": {},
        "all": {
            "title": "everything",
            "layers": ["half", "activation_checkpointing", {"seed_everything": 1}],
        },
    },
}


def write(folder: Path, base: dict[str, object] = MINIMAL, **changes: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**base, **changes}, sort_keys=False))
    return path


def test_rows_are_base_scale_and_layers_in_this_order(tmp_path):
    experiment = load_experiment(write(tmp_path), "small", "cuda", read_recipe)
    plain, everything = experiment.rows
    assert plain.settings["trainer"]["accelerator"] == "gpu"
    assert plain.settings["trainer"]["max_steps"] == 3 + 2
    assert plain.settings["data"] == {"n": 1}
    assert everything.title == "everything"
    assert everything.settings["trainer"]["precision"] == "bf16-mixed"
    [callback] = everything.settings["trainer"]["callbacks"]
    assert callback["class_path"].endswith("ActivationCheckpointing")
    assert experiment.folder_name == "mine_cuda_small"


def test_a_scale_lays_its_overlays_over_those_of_the_file(tmp_path):
    half = {"trainer": {"max_epochs": 7}, "data": {"n": 9}}
    small = {"base": {"data": {"n": 1}}, "overlays": {"half": half}}
    path = write(tmp_path, scales={"full": {}, "small": small})
    _, everything = load_experiment(path, "small", "cpu", read_recipe).rows
    assert everything.settings["trainer"]["precision"] == "bf16-mixed"
    assert (everything.settings["trainer"]["max_epochs"], everything.settings["data"]["n"]) == (7, 9)
    _, everything = load_experiment(path, "full", "cpu", read_recipe).rows
    assert everything.settings["trainer"]["max_epochs"] == -1


def test_the_key_follows_what_is_measured_and_nothing_else(tmp_path):
    def keys(**changes: object) -> list[str]:
        return [row.key for row in load_experiment(write(tmp_path, **changes), "small", "cpu", read_recipe).rows]

    before = keys()
    assert before[0] != before[1]
    assert keys(title="another", measure={"timeout_s": 5}) == before
    assert keys(measure={"warmup_steps": 9})[0] != before[0]
    changed = keys(overlays={"half": {"trainer": {"precision": "16-mixed"}}})
    assert (changed[0] == before[0], changed[1] == before[1]) == (True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {"a": {"layer": []}}}, r"`rows.a` has no key `layer`. Closest: layers."),
        ({"rows": {"a": {"layers": ["halff"]}}}, r"halff` is neither a file nor a recipe"),
        ({"rows": {"a": {"layers": [3]}}}, "`layers` holds 3; a layer is a name or a mapping"),
        ({"rows": {}}, "lacks `rows`"),
        ({"rows": {"../a": {}}}, "`rows` has the name '../a', which is to be a file's"),
        ({"measure": {"timed_steps": 0}, "scales": {"small": {}}}, "`measure.timed_steps=0` must be at least 1"),
        ({"measures": {}}, r"no key `measures`. Closest: measure"),
        ({"scales": {"full": {}}}, "`--scale small`: mine.yaml has no such scale. Closest: full."),
    ],
)
def test_mistakes_name_what_and_how_to_fix(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_experiment(write(tmp_path, **changes), "small", "cpu", read_recipe)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("scale", ["small", "full"])
def test_committed_experiments_are_valid(path, scale):
    experiment = load_experiment(path, scale, "cpu", read_recipe)
    assert len({row.key for row in experiment.rows}) == len(experiment.rows)


# --- sweeps -----------------------------------------------------------------------------------------------------------

SWEEP = {
    "title": "T",
    "base": {"model": {"class_path": "M"}, "trainer": {"precision": "32-true"}},
    "matrix": {
        "devices": [1, 2],
        "micro_batch_size": [2, 4],
        "sequence_length": [16],
        "technique": {"none": [], "half": [{"trainer": {"precision": "bf16-mixed"}}]},
    },
}


def test_every_point_of_the_matrix_with_its_settings(tmp_path):
    sweep = load_sweep(write(tmp_path, SWEEP), "cpu", read_recipe)
    assert len(sweep.rows) == 8
    assert len({row.key for row in sweep.rows}) == 8
    [row] = sweep.only(["p2_b4_s16_half"])
    assert row.point == {"devices": 2, "micro_batch_size": 4, "sequence_length": 16, "technique": "half"}
    assert row.settings["trainer"]["devices"] == 2
    assert row.settings["trainer"]["strategy"] == "ddp"
    assert row.settings["trainer"]["precision"] == "bf16-mixed"
    assert row.settings["data"]["init_args"] == {"batch_size": 4, "sequence_length": 16}
    [row] = sweep.only(["p1_b2_s16_none"])
    assert "strategy" not in row.settings["trainer"]


def test_a_global_batch_sets_the_accumulation(tmp_path):
    sweep = load_sweep(write(tmp_path, SWEEP, global_batch_size=16), "cpu", read_recipe)
    for row in sweep.rows:
        accumulation = row.settings["trainer"]["accumulate_grad_batches"]
        assert accumulation * row.point["micro_batch_size"] * row.point["devices"] == 16


def test_ranks_that_compute_together_see_one_batch(tmp_path):
    spec = {"class_path": "FullyShardedStrategy", "init_args": {"tensor_parallel_size": 2}}
    technique = {"none": [], "together": [{"trainer": {"strategy": spec}}]}
    matrix = {**SWEEP["matrix"], "devices": [2], "technique": technique}
    sweep = load_sweep(write(tmp_path, SWEEP, global_batch_size=16, matrix=matrix), "cpu", read_recipe)
    found = {row.name: row.settings["trainer"]["accumulate_grad_batches"] for row in sweep.rows}
    assert found == {
        "p2_b2_s16_none": 4, "p2_b2_s16_together": 8, "p2_b4_s16_none": 2, "p2_b4_s16_together": 4
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrix": {"device": [1]}}, "`matrix` has no key `device`. Closest: devices"),
        ({"matrix": {"devices": 2}}, r"`matrix.devices=2` must be a list of positive integers"),
        ({"matrix": {"devices": [0]}}, r"`matrix.devices=\[0\]` must be a list of positive integers"),
        ({"matrix": {"technique": ["none"]}}, "`matrix.technique` holds .* where a mapping"),
        ({"global_batch_size": 12, "matrix": {"micro_batch_size": [8]}}, "12` is no multiple of micro-batch 8 x 1"),
        ({"global_batch_size": 12, "matrix": {"devices": [1]}}, "`matrix.micro_batch_size`, which is absent"),
        ({"matrix": {"technique": {"a b": [], "a-b": []}}}, "Some points of `matrix` have the same name"),
        ({"paths": {"devices": "x"}}, "`paths` has no key `devices`"),
    ],
)
def test_mistakes_in_a_matrix_name_what_and_how_to_fix(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_sweep(write(tmp_path, SWEEP, **changes), "cpu", read_recipe)


@pytest.mark.parametrize("path", sorted((FOLDER / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_sweeps_are_valid(path):
    assert len(load_sweep(path, "cpu", read_recipe).rows) >= 12
