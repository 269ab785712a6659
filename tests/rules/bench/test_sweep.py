from pathlib import Path

import pytest
import yaml

from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.experiment import load_sweep

MINIMAL = {
    "title": "T",
    "base": {"model": {"class_path": "M"}, "trainer": {"precision": "32-true"}},
    "matrix": {
        "devices": [1, 2],
        "micro_batch_size": [2, 4],
        "sequence_length": [16],
        "technique": {"none": [], "half": [{"trainer": {"precision": "bf16-mixed"}}]},
    },
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **changes}, sort_keys=False))
    return path


def test_every_point_of_the_matrix_with_its_settings(tmp_path):
    sweep = load_sweep(write(tmp_path), "cpu", read_recipe)
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
    sweep = load_sweep(write(tmp_path, global_batch_size=16), "cpu", read_recipe)
    for row in sweep.rows:
        accumulation = row.settings["trainer"]["accumulate_grad_batches"]
        assert accumulation * row.point["micro_batch_size"] * row.point["devices"] == 16


def test_ranks_that_compute_together_see_one_batch(tmp_path):
    spec = {"class_path": "FullyShardedStrategy", "init_args": {"tensor_parallel_size": 2}}
    technique = {"none": [], "together": [{"trainer": {"strategy": spec}}]}
    matrix = {**MINIMAL["matrix"], "devices": [2], "technique": technique}
    sweep = load_sweep(write(tmp_path, global_batch_size=16, matrix=matrix), "cpu", read_recipe)
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
def test_mistakes_name_what_and_how_to_fix(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_sweep(write(tmp_path, **changes), "cpu", read_recipe)


@pytest.mark.parametrize("path", sorted((FOLDER / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_sweeps_are_valid(path):
    assert len(load_sweep(path, "cpu", read_recipe).rows) >= 12
