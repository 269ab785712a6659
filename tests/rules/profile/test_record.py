import dataclasses

import numpy as np
import pytest

from lightning_memfit.memory.cache_files import write_file
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.profile.record import ModelProfile

from .test_events import HAND_MADE


@pytest.fixture
def profile():
    return ModelProfile(
        name="Net",
        events=HAND_MADE,
        micro_batch_size=4,
        parameters=(
            ParameterInfo("a.weight", 50, 2),
            ParameterInfo("b.weight", 50, 2, shared_with="a.weight"),
            ParameterInfo("c", 7, 4, trainable=False),
        ),
        slopes=np.array([0.0, 2.0, 250.0, 0.5]),
        flops={"forward": 10, "backward": 20},
        attention_kernels={"flash": 3},
        assumptions=("a value was read as 1.0",),
        versions={"torch": "2.13.0"},
        sequence_length=16,
    )


def test_what_is_saved_is_loaded(profile, tmp_path):
    path = tmp_path / "deep" / "folder" / "profile.npz"
    write_file(path, profile.write)
    loaded = ModelProfile.load(path)
    for field in dataclasses.fields(profile):
        mine, its = getattr(profile, field.name), getattr(loaded, field.name)
        if field.name == "events":
            for array in dataclasses.fields(mine):
                assert np.array_equal(getattr(mine, array.name), getattr(its, array.name)), array.name
        elif field.name == "slopes":
            assert np.array_equal(mine, its)
        else:
            assert mine == its, field.name
    assert type(loaded.events.phases[0]) is tuple
    assert [file.name for file in path.parent.iterdir()] == ["profile.npz"]


def test_a_profile_without_slopes_and_an_overwritten_one(profile, tmp_path):
    path = tmp_path / "profile.npz"
    write_file(path, profile.write)
    write_file(path, dataclasses.replace(profile, slopes=None, only_this_size="ragged").write)
    loaded = ModelProfile.load(path)
    assert loaded.slopes is None
    with pytest.raises(ValueError, match=r"micro_batch_size=2.*Net is known at 4 only \(ragged\)"):
        loaded.events_at(2)
    assert loaded.events_at(4) is loaded.events_at(None)


def test_tied_parameters_count_once(profile):
    assert profile.num_parameters == 57
    assert profile.num_trainable == 50


def test_events_at_another_size(profile):
    assert profile.events_at(5).sizes.tolist() == [100, 12, 1250, 8]
    assert profile.events_at(1).sizes.tolist() == [100, 4, 250, 6]
    with pytest.raises(ValueError, match="must be at least 1"):
        profile.events_at(0)
