"""What is replaced in DeepSpeed was tried without the replacement, with the version that is named here."""

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from lightning_memfit.strategies.upstream import deepspeed

TRIED_WITH = "0.19.8"
TESTS = Path(__file__).parents[2]
MENDS = {
    "step_by_gradients_of_the_window": "ranks/test_zero_any_module.py::test_a_layer_that_some_batches_leave_out",
    "begin_pass": "ranks/test_zero_by_hand.py::test_steps_by_hand_are_those_of_one_device",
    "removing_engine_hooks_only": "ranks/test_zero_by_hand.py::test_evaluation_takes_what_was_saved_and_leaves_hooks",
    "gather_before_hooks": "ranks/test_whole_weights.py::test_hooks_before_a_forward_find_whole_weights",
    "save_what_is_not_stepped": "ranks/test_zero_any_module.py::test_it_trains_and_resumes_as_under_ddp",
    "whole_weights_in_builds": "ranks/test_whole_weights.py::test_copies_of_partitioned_networks_are_whole",
    "copy_parameters_from_swap_buffers": "ranks/test_zero_infinity.py::test_losses_are_those_of_plain_torch",
    "swap_in_own_dtype": "ranks/test_zero_infinity.py::test_losses_are_those_of_plain_torch",
    "gather_states_from_disk": "ranks/test_zero_infinity.py::test_saved_and_resumed_exactly",
}
"""Each mend, and the test that fails without it."""


@pytest.mark.parametrize("name", MENDS)
def test_a_mend_has_a_test_that_fails_without_it(name: str) -> None:
    assert callable(getattr(deepspeed, name))
    file, _, function = MENDS[name].partition("::")
    assert f"def {function}(" in (TESTS / file).read_text()


def test_mends_are_tried_again_with_every_version_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    assert Version(version("deepspeed")) <= Version(TRIED_WITH), (
        "remove each of MENDS once and run its test: those that pass without it go away; then set TRIED_WITH"
    )
