"""What is said, and what is not, of steps that can't be tried."""

import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning_memfit.profile.build import measure_step, profile_module
from lightning_memfit.profile.trace import TraceError
from tests.truth.profile.modules import Classifier, batch


class Doing(Classifier):
    """Does something in every step.

    Args:
        act: What to do.
    """

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.act()
        return self.loss(batch)


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise ValueError("no logger")


@pytest.mark.parametrize("profile", [profile_module, measure_step])
def test_an_interrupt_stays_one(profile: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        profile(Doing(interrupt), batch())
    assert signal.getsignal(signal.SIGINT) is before


def test_a_step_that_ends_the_program_does_not_end_it() -> None:
    with pytest.raises(TraceError, match="ends the program with 3"):
        profile_module(Doing(lambda: sys.exit(3)), batch())


def test_nothing_is_said_of_training_that_is_not_known() -> None:
    with pytest.raises(TraceError, match="ValueError: no logger") as found:
        profile_module(Doing(fail), batch())
    assert "training should end" not in str(found.value)


@pytest.mark.parametrize(("profile", "word"), [(profile_module, "traced"), (measure_step, "measured")])
def test_what_was_tried_is_named(profile: Callable[..., Any], word: str) -> None:
    class Reaching(Classifier):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            original = reference()
            assert original is not None
            return self.loss(batch) + sum(torch.ones(()) * weight.sum() for weight in original.parameters())

    module = Reaching()
    reference = weakref.ref(module)
    with pytest.raises(TraceError, match=rf"can't be {word}: it reaches the module itself"):
        profile(module, batch())


class Touchy:
    """Answers to no name, and has no dictionary; the mocks of pydantic do so."""

    __slots__ = ("value",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


TOUCHY = Touchy()


class HoldsTouchy(Classifier):
    touchy = Touchy()

    def __init__(self) -> None:
        super().__init__()
        self.held = [Touchy()]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert TOUCHY is not self.touchy
        sys.modules["memfit_touchy"] = sys  # so that it is looked for what the step names
        return super().training_step(batch, batch_idx)


def test_objects_that_answer_to_no_name_do_not_end_a_trace() -> None:
    assert measure_step(HoldsTouchy(), batch()).num_parameters > 0
    assert "memfit_touchy" not in sys.modules
