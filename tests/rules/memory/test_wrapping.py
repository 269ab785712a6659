import copy
import gc
import pickle
import sys
from types import MethodType

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_memfit.memory.wrapping import Layered, own_attribute, wrap_method


class Counter:
    def __init__(self):
        self.start = 1

    def count(self, by=1):
        return self.start + by


def times(factor):
    return lambda inner, *args, **kwargs: factor * inner(*args, **kwargs)


def plus(term):
    return lambda inner, *args, **kwargs: term + inner(*args, **kwargs)


def test_an_objects_own_attributes_are_told_from_inherited_ones():
    counter = Counter()
    assert own_attribute(counter, "count") is None
    assert own_attribute(counter, "missing") is None
    assert own_attribute(counter, "start") == 1
    counter.count = replaced = lambda by=1: by
    assert own_attribute(counter, "count") is replaced
    bound = Counter()
    bound.count = other = MethodType(lambda self, by=1: by, bound)
    assert own_attribute(bound, "count") is other


def test_wrapping_does_not_make_the_objects_dictionary():
    # In CPython 3.11 and 3.12 a strategy whose dictionary has been made is slower in every step.
    def is_made(counter):
        return any(isinstance(one, dict) for one in gc.get_referents(counter))

    counter, made = Counter(), Counter()
    wrap_method(counter, "count", times(10))()
    untouched = is_made(counter)
    vars(made)
    assert not untouched or sys.version_info[:2] not in ((3, 11), (3, 12))
    assert is_made(made) or sys.version_info >= (3, 13)  # whose collector no longer tells


def test_later_layers_are_outside_and_an_innermost_one_inside():
    counter = Counter()
    wrap_method(counter, "count", plus(1))
    undo = wrap_method(counter, "count", times(10), innermost=True)
    assert counter.count(by=2) == 31
    undo()
    assert counter.count(by=2) == 4
    wrap_method(counter, "count", times(10))
    assert counter.count(by=2) == 40


def test_layers_come_off_in_any_order():
    for first in (0, 1):
        counter = Counter()
        undo = [wrap_method(counter, "count", times(10)), wrap_method(counter, "count", plus(1))]
        undo[first]()
        undo[first]()
        assert counter.count() == (20 if first else 3)
        undo[1 - first]()
        assert vars(counter) == {"start": 1}


def test_an_attribute_of_the_instance_is_put_back():
    counter = Counter()
    counter.count = MethodType(lambda self: 5, counter)
    before = counter.count
    undo = wrap_method(counter, "count", times(2))
    assert counter.count() == 10
    undo()
    assert vars(counter)["count"] is before


def test_what_others_wrapped_around_ours_stays():
    counter = Counter()
    undo = wrap_method(counter, "count", times(10))
    inner = counter.count
    counter.count = lambda: inner() + 0.5
    undo()
    assert counter.count() == 2.5


def test_lightning_calls_a_hook_that_only_we_wrapped():
    module = LightningModule()
    assert not is_overridden("configure_model", module)
    undo = wrap_method(module, "configure_model", lambda inner: inner())
    assert is_overridden("configure_model", module)
    undo()
    assert not is_overridden("configure_model", module)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("name", ["forward", "extra_repr"])
def test_copies_have_the_method_without_layers(copied, name):
    module = nn.Linear(2, 3)
    wrap_method(module, name, plus("layer"))
    other = copied(module)
    assert getattr(other, name).__self__ is other
    assert isinstance(vars(module)[name], Layered)
