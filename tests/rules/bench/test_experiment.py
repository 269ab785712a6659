"""Experiments are read, resolved and refused; the committed ones are valid."""

from pathlib import Path

import pytest
import yaml

from cli.bench import FOLDER, read_recipe
from lightning_memfit.bench.experiment import load_experiment

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


def write(folder: Path, **changes: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **changes}, sort_keys=False))
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
