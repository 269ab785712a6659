import pytest

from lightning_memfit.bench.experiment import overlay


def test_mappings_merge_and_the_rest_is_replaced():
    base = {"trainer": {"precision": "32-true", "devices": 1}, "tags": [1]}
    assert overlay(base, {"trainer": {"precision": "bf16-mixed"}, "tags": [2]}) == {
        "trainer": {"precision": "bf16-mixed", "devices": 1},
        "tags": [2],
    }
    assert base["trainer"]["precision"] == "32-true"


def test_plus_appends_and_makes_the_list_where_there_is_none():
    first = overlay({"trainer": {}}, {"trainer": {"callbacks+": ["a"]}})
    assert overlay(first, {"trainer": {"callbacks+": ["b"]}}) == {"trainer": {"callbacks": ["a", "b"]}}
    assert overlay({}, {"trainer": {"callbacks+": ["a"]}}) == {"trainer": {"callbacks": ["a"]}}


def test_another_class_loses_the_arguments_of_the_first():
    base = {"model": {"class_path": "A", "init_args": {"x": 1}}}
    assert overlay(base, {"model": {"class_path": "B", "init_args": {"y": 2}}})["model"]["init_args"] == {"y": 2}
    assert overlay(base, {"model": {"class_path": "A", "init_args": {"y": 2}}})["model"]["init_args"] == {
        "x": 1,
        "y": 2,
    }


def test_appending_to_what_is_no_list_is_refused():
    with pytest.raises(ValueError, match=r"`logger\+` appends to a list, but found list on bool"):
        overlay({"logger": False}, {"logger+": []})
