"""What a step changes on a module is found, put back, and put together from what micro-batches write."""

import random
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics.aggregation import MeanMetric

from lightning_memfit.fitting.recovery.step_state import (
    MISSING,
    MicroBatchStates,
    Saved,
    Slot,
    StateRules,
    StepState,
    alike,
    content_of,
    copies_of,
    find_slots,
    reading_of,
    sampled_weights,
    with_content,
)
from lightning_memfit.fitting.step.outputs import merge_kept


class Helper:
    """A plain object of the user's, with another in it."""

    def __init__(self, depth: int = 1) -> None:
        self.calls = 0
        self.history: list[Any] = []
        self.generator = torch.Generator().manual_seed(1)
        if depth:
            self.inner = Helper(depth - 1)


class Module(nn.Module):
    """One of everything that a step can write."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 3))
        self.metric = MeanMetric()
        self.helper = Helper()
        self.space = SimpleNamespace(count=0, weight=1.0)
        self.calls = 0
        self.losses: list[Tensor] = []
        self.counts = {"a": 1, "b": [2]}
        self.recent: deque[int] = deque(maxlen=3)
        self.names = {"x"}
        self.array = numpy.zeros(3)
        self.noise = torch.Generator().manual_seed(0)
        self.numpy_noise = numpy.random.default_rng(0)
        self.legacy_noise = numpy.random.RandomState(0)
        self.python_noise = random.Random(0)


def everything(module: Module) -> dict[str, Any]:
    return {name: reading_of(slot.read()) for name, slot in find_slots(module).items()}


def write_everything(module: Module) -> list[Any]:
    """Change all that can be changed, and return what was drawn."""
    module.norm(torch.rand(4, 3))
    for parameter in module.teacher.parameters():
        parameter.data.mul_(0.9)
    module.teacher.weight.data = module.teacher.weight.data + 1
    module.queue.roll(1, 0)
    module.queue[0] = 1
    module.helper.calls += 1
    module.helper.history.append(module.helper.calls)
    module.helper.inner.calls += 1
    module.space.count += 1
    module.space.weight *= 0.5
    module.calls += 1
    module.losses.append(torch.ones(()))
    module.counts["b"].append(3)
    module.counts["c"] = 4
    module.recent.append(module.calls)
    module.names.add(str(module.calls))
    module.array += 1
    module.new = "attribute"
    generators = (module.noise, module.helper.generator, module.helper.inner.generator)
    drawn: list[Any] = [torch.rand(2, generator=generator).tolist() for generator in generators]
    return [
        *drawn,
        module.numpy_noise.random(),
        module.legacy_noise.random_sample(),
        module.python_noise.random(),
    ]


# --- finding ----------------------------------------------------------------------------------------------------------


def test_what_a_step_can_write_is_found() -> None:
    found = find_slots(Module())
    assert {"queue", "norm.running_mean", "norm.num_batches_tracked", "teacher.weight", "teacher.bias"} <= found.keys()
    assert {"calls", "losses", "counts", "recent", "names", "array", "noise", "space.count"} <= found.keys()
    assert {"helper.calls", "helper.history", "helper.generator", "helper.inner.calls"} <= found.keys()
    assert not {"net.weight", "net.bias", "training", "net.training"} & found.keys()
    assert not any(name.startswith("metric") for name in found)


def test_slots_read_the_value_of_the_moment() -> None:
    module = Module()
    slots = find_slots(module)
    module.helper.calls = 7
    module.space.count = 3
    module.calls = 5
    module.queue = torch.ones(2)
    del module.array
    assert [slots[name].read() for name in ("helper.calls", "space.count", "calls")] == [7, 3, 5]
    assert slots["queue"].read() is module.queue
    assert slots["array"].read() is MISSING


def test_objects_that_refer_to_each_other_are_found_once() -> None:
    module = Module()
    module.helper.inner.above = module.helper
    module.helper.module = module
    module.again = module.helper
    found = find_slots(module)
    places = [slot.place() for slot in found.values()]
    assert sum(owner is vars(module.helper) and key == "calls" for owner, key in places) == 1


def test_what_is_no_state_of_the_step_is_left_alone() -> None:
    class Data(torch.utils.data.Dataset):
        calls = 0

    module = nn.Module()
    module.dataset, module.kind, module.loss = Data(), Helper, nn.functional.mse_loss
    module.dataset.reads = 1
    found = find_slots(module)
    assert not any(name.startswith(("dataset.", "kind.", "loss.")) for name in found)
    assert content_of(module.dataset) is content_of(module.kind) is content_of(module.loss) is None


# --- saving and putting back ------------------------------------------------------------------------------------------


def test_everything_is_put_back_and_drawn_again() -> None:
    module = Module()
    state = StepState(module)
    saved = state.save()
    before, drawn = everything(module), write_everything(module)
    assert len([name for name, value in everything(module).items() if not alike(before.get(name), value, 0.0)]) > 15
    identities = {name: id(slot.read()) for name, slot in find_slots(module).items() if name not in ("calls", "new")}
    StepState.load(saved)
    now = everything(module)
    assert all(alike(value, now[name], 0.0) for name, value in before.items())
    assert write_everything(module) == drawn
    assert identities["queue"] == id(module.queue)
    assert identities["helper.history"] == id(module.helper.history)
    assert identities["teacher.weight"] == id(module.teacher.weight)


def test_only_some_names_are_put_back() -> None:
    module = Module()
    saved = StepState(module).save()
    write_everything(module)
    StepState.load(saved, ["calls", "helper.calls", "nowhere"])
    assert (module.calls, module.helper.calls, module.space.count) == (0, 0, 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_what_has_changed_once_is_saved_later_as_well(steps: int) -> None:
    module = Module()
    state = StepState(module)
    for _ in range(9 + steps):  # the first steps are saved whole
        state.save()
        write_everything(module)
    saved = state.save()
    assert not state.is_looking
    assert "net.weight" not in saved
    before, drawn = everything(module), write_everything(module)
    StepState.load(saved)
    assert all(alike(value, everything(module)[name], 0.0) for name, value in before.items())
    assert write_everything(module) == drawn


def test_a_module_that_writes_nothing_costs_nothing() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    state = StepState(module)
    saved = [state.save() for _ in range(10)]
    assert saved[9] == {}
    assert state.written() == set()
    assert not state.writes_weights


def test_a_buffer_that_begins_to_change_later_is_seen() -> None:
    module = Module()
    state = StepState(module)
    for _ in range(10):
        state.save()
    module.queue.add_(1)
    assert "queue" in state.save()
    module.queue.add_(1)
    assert "queue" in state.save()


def test_written_names_what_has_changed_since_save() -> None:
    module = Module()
    state = StepState(module)
    state.save()
    assert state.is_looking
    assert state.written() == set()
    module.helper.calls += 1
    module.queue[0] = 1
    module.new = 1
    torch.rand(1, generator=module.noise)  # generators are put back, but no value that micro-batches disagree on
    assert state.written() == {"helper.calls", "queue", "new"}


def test_numbers_and_what_is_watched_are_saved_in_every_step() -> None:
    module = Module()
    state = StepState(module)
    for _ in range(10):
        state.save()
    slots = find_slots(module)
    numbers = state.save().keys()
    assert numbers == {"calls", "helper.calls", "helper.inner.calls", "space.count", "space.weight"}
    state.watch([slots["queue"]])
    assert state.save().keys() == {*numbers, "queue"}
    assert state.copies().keys() == {"queue"}


def test_a_number_that_changes_between_two_looks_is_found_and_put_back() -> None:
    module = Module()
    state = StepState(module)
    for _ in range(10):
        state.save()
    saved = state.save()
    assert not state.is_looking
    module.calls += 1
    module.helper.calls += 1
    assert state.written() == {"calls", "helper.calls"}
    StepState.load(saved)
    assert (module.calls, module.helper.calls) == (0, 0)
    assert state.written() == set()


def test_a_teacher_written_through_data_is_put_back() -> None:
    """Version counters don't grow by such a write."""
    module = Module()
    state = StepState(module)
    saved, before = state.save(), module.teacher.weight.clone()
    version = module.teacher.weight._version
    module.teacher.weight.data.lerp_(module.net.weight.data, 0.5)
    assert module.teacher.weight._version == version
    assert state.written() == {"teacher.weight"}
    StepState.load(saved)
    torch.testing.assert_close(module.teacher.weight, before, rtol=0, atol=0)


def test_frozen_weights_below_adapters_are_not_copied_unless_they_change() -> None:
    module = nn.ModuleDict({"adapter": nn.Linear(2, 2), "base": nn.Linear(50, 50).requires_grad_(False)})
    state = StepState(module)
    assert "base.weight" not in state.save()
    module["base"].weight.data.add_(1)
    assert "base.weight" in state.save()


@pytest.mark.parametrize("writes", [True, False])
def test_writes_to_weights_are_found(writes: bool) -> None:
    module = Module()
    state = StepState(module)
    state.save()
    if writes:
        module.net.weight.data.clamp_(-0.1, 0.1)
    state.look_at_weights()
    assert state.writes_weights is writes
    for _ in range(9):
        state.save()
    saved, before = state.save(), module.net.weight.clone()
    assert ("net.weight" in saved) is writes
    module.net.weight.data.mul_(0.5)
    StepState.load(saved)
    assert torch.equal(before, module.net.weight) is writes


def test_samples_of_large_weights_show_writes() -> None:
    module = nn.Linear(100, 100)
    assert sampled_weights(module)["weight"].numel() <= 1112
    before = reading_of(sampled_weights(module)["weight"])
    module.weight.data.mul_(0.99)
    assert not alike(before, reading_of(sampled_weights(module)["weight"]), 0.0)


# --- readings ---------------------------------------------------------------------------------------------------------

scalars = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(-9, 9), st.text(max_size=2))
tensors = st.lists(st.floats(-9, 9), max_size=3).map(lambda values: torch.tensor(values, dtype=torch.float64))
values = st.recursive(
    st.one_of(scalars, tensors, tensors.map(Tensor.numpy), st.sets(st.integers(0, 5))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda d: SimpleNamespace(**d)),
    ),
    max_leaves=8,
)


@given(values)
def test_any_value_is_like_itself_and_unlike_a_list_with_one_more(value: Any) -> None:
    assert alike(reading_of(value), reading_of(value), 0.0)
    assert not alike(reading_of([value]), reading_of([value, value]), 0.0)
    assert not alike(reading_of({"a": value}), reading_of({"b": value}), 0.0)


def scramble(value: Any) -> None:
    """Change a value in place as far as it can be changed."""
    if isinstance(value, Tensor):
        value.add_(1)
    elif isinstance(value, numpy.ndarray):
        value += 1
    elif isinstance(value, SimpleNamespace):
        scramble(vars(value))
    elif isinstance(value, dict):
        for item in value.values():
            scramble(item)
        value["new"] = 1
    elif isinstance(value, (list, tuple, deque)):
        for item in value:
            scramble(item)
        if not isinstance(value, tuple):
            value.append(1)
    elif isinstance(value, set):
        value.add(99)


@given(values)
def test_the_content_of_any_value_is_put_back_in_place(value: Any) -> None:
    content, before = content_of(value), reading_of(plain(value))
    scramble(value)
    assert with_content(value, content) is value
    assert alike(reading_of(plain(value)), before, 0.0)


def plain(value: Any) -> Any:
    """Turn objects into dicts, which readings look into."""
    if isinstance(value, SimpleNamespace):
        return {key: plain(item) for key, item in vars(value).items()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple, deque)) else value


def test_readings_do_not_follow_the_value() -> None:
    tensor, array, nested = torch.zeros(2), numpy.zeros(2), [torch.zeros(2), {"a": numpy.zeros(2)}]
    readings = [reading_of(value) for value in (tensor, array, nested)]
    tensor += 1
    array += 1
    nested[0] += 1
    nested[1]["a"] += 1
    assert alike(readings, [torch.zeros(2), torch.zeros(2).double(), [torch.zeros(2), {"a": torch.zeros(2)}]], 0.0)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.0 + 1e-12, True),
        (1.0, 1.1, False),
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
        (True, 1, False),
        (torch.tensor([1.0, 1e-14]), torch.tensor([1.0, 0.0]), True),
        (torch.tensor([1.0, 1e-3]), torch.tensor([1.0, 0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1]), torch.tensor([2]), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), [1.0, 1.0], False),
        (torch.ones(0), torch.ones(0), True),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"b": 1}, False),
        ("a", "a", True),
        (None, MISSING, False),
    ],
)
def test_alike(one: Any, other: Any, expected: bool) -> None:
    assert alike(one, other, 1e-9) is expected
    assert alike({"x": [one]}, {"x": [other]}, 1e-9) is expected


def test_generators_are_read_by_their_state() -> None:
    for source, draw in (
        (torch.Generator().manual_seed(0), lambda g: torch.rand(1, generator=g)),
        (numpy.random.default_rng(0), lambda g: g.random()),
        (numpy.random.RandomState(0), lambda g: g.random_sample()),
        (random.Random(0), lambda g: g.random()),
    ):
        before, content = reading_of(source), content_of(source)
        draw(source)
        assert not alike(before, reading_of(source), 0.0)
        assert with_content(source, content) is source
        assert alike(before, reading_of(source), 0.0)


# --- micro-batches ----------------------------------------------------------------------------------------------------


def put_together(module: nn.Module, writes: Any, sizes: list[int], weights: list[float], **rules: Any) -> set[str]:
    """Let micro-batches write on the module, by the rules given."""
    sets = {way: frozenset(names) for way, names in rules.items()}
    saved = copies_of(slot for name, slot in find_slots(module).items() if name in frozenset().union(*sets.values()))
    states = MicroBatchStates(StateRules(**sets), saved)
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        if index:
            states.before_next()
        writes(module, index, size)
        states.add(size, weight)
    return states.finish(merge_kept)


def test_restored_is_written_once() -> None:
    module = Module()

    def step(module: Module, index: int, size: int) -> None:
        module.calls += 1
        module.helper.history.append(module.calls)
        module.queue.add_(1)

    names = ["calls", "helper.history", "queue"]
    assert put_together(module, step, [1, 2, 1], [1.0, 2.0, 1.0], restored=names) == set()
    assert (module.calls, module.helper.history, module.queue.unique().tolist()) == (1, [1], [1])


def test_averaged_is_the_mean_over_samples() -> None:
    module = Module()
    queue = module.queue
    module.running = 8.0

    def step(module: Module, index: int, size: int) -> None:
        module.queue.mul_(0.5).add_(float(index))
        module.running = 0.5 * module.running + index

    # Weights of the loss are those of labels; the running mean is one over samples.
    put_together(module, step, [1, 3], [5.0, 1.0], averaged=["queue", "running"])
    assert module.queue is queue
    assert module.queue.unique().tolist() == [0.75]
    assert module.running == 4.75


def test_merged_lists_get_one_entry_per_batch() -> None:
    module = Module()
    module.losses = losses = [torch.tensor(9.0)]

    def step(module: Module, index: int, size: int) -> None:
        module.losses.append(torch.tensor(float(index)))

    put_together(module, step, [2, 2], [3.0, 1.0], merged=["losses"])
    assert module.losses is losses
    assert [float(value) for value in losses] == [9.0, 0.25]


def test_joined_rows_are_those_of_the_batch() -> None:
    module = Module()
    module.kept = None

    def step(module: Module, index: int, size: int) -> None:
        module.kept = torch.full((size, 2), float(index))

    put_together(module, step, [1, 2], [1.0, 2.0], joined=["kept"])
    assert module.kept.tolist() == [[0, 0], [1, 1], [1, 1]]


def test_carried_goes_on() -> None:
    module = Module()

    def step(module: Module, index: int, size: int) -> None:
        module.calls += size
        module.queue = torch.cat([torch.full((size, 3), float(index)), module.queue])[:4]

    put_together(module, step, [1, 2], [1.0, 2.0], carried=["calls", "queue"])
    assert module.calls == 3
    assert module.queue[:, 0].tolist() == [1, 1, 0, 0]


def test_all_ways_at_once() -> None:
    module = Module()
    module.kept, module.total = None, 0

    def step(module: Module, index: int, size: int) -> None:
        module.calls += 1
        module.total += size
        module.space.weight += index
        module.losses.append(torch.tensor(1.0))
        module.kept = torch.ones(size)

    rules = StateRules(
        restored=frozenset({"calls"}),
        averaged=frozenset({"space.weight"}),
        merged=frozenset({"losses"}),
        joined=frozenset({"kept"}),
        carried=frozenset({"total"}),
    )
    assert rules.names == {"calls", "space.weight", "losses", "kept", "total"}
    sets = {way: getattr(rules, way) for way in StateRules.ways()}
    put_together(module, step, [3, 1], [3.0, 1.0], **sets)
    assert (module.calls, module.total, module.space.weight, len(module.losses), len(module.kept)) == (1, 4, 1.25, 1, 4)


@pytest.mark.parametrize("is_different", [False, True])
def test_what_seemed_to_be_written_alike_is_told_when_it_is_not(is_different: bool) -> None:
    module = Module()

    def step(module: Module, index: int, size: int) -> None:
        module.queue[0] = 1.0
        module.calls = index if is_different else 1

    found = put_together(module, step, [2, 2], [2.0, 2.0], restored=["queue", "calls"], unproven=["queue", "calls"])
    assert found == ({"calls"} if is_different else set())


@dataclass(frozen=True)
class Stats:
    count: int = 0
    mean: Tensor | None = None


def test_an_object_that_the_step_replaces_is_put_back() -> None:
    module = nn.Module()
    module.stats = before = Stats(3, torch.zeros(2))
    slots = find_slots(module)
    saved = copies_of(slots.values())
    module.stats = Stats(4, torch.ones(2))
    assert slots["stats.count"].read() == 4
    before.mean.add_(7)
    StepState.load(saved)
    assert module.stats is before
    assert (before.count, before.mean.tolist()) == (3, [0, 0])


def test_micro_batches_replace_an_object_by_one() -> None:
    module = Module()
    module.stats = Stats(3, torch.zeros(2))

    def step(module: Module, index: int, size: int) -> None:
        module.stats = Stats(module.stats.count + 1, module.stats.mean + index)

    put_together(module, step, [1, 3], [1.0, 3.0], restored=["stats.count"], averaged=["stats.mean"])
    assert (module.stats.count, module.stats.mean.tolist()) == (4, [0.75, 0.75])


@pytest.mark.parametrize("inner", [(), ("count",)])
def test_what_the_step_makes_is_removed_again(inner: tuple[str, ...]) -> None:
    module = Module()
    slot = Slot("made", vars(module), "made", inner)
    state = StepState(module)
    state.watch([slot])
    saved = state.copies()
    assert slot.read() is MISSING
    module.made = Stats(1)
    assert slot.read() is (1 if inner else module.made)
    StepState.load(saved)
    assert not hasattr(module, "made")


def test_objects_without_attributes_get_none() -> None:
    module = nn.Module()
    module.space = SimpleNamespace()
    content = content_of(module.space)
    module.space.count = 1
    assert find_slots(module).keys() == {"space.count"}
    assert with_content(module.space, content) == SimpleNamespace()


def test_missing_values_are_removed_again() -> None:
    owner: dict[str, Any] = {"new": 1}
    saved: Saved = {"new": (Slot("new", owner, "new"), MISSING, None)}
    StepState.load(saved)
    assert owner == {}


def test_numbers_of_numpy_stay_what_they_are() -> None:
    module = nn.Module()
    module.margin, module.table = numpy.float64(0.5), numpy.array(0.5)
    saved = copies_of(find_slots(module).values())
    module.margin = numpy.float64(1.0)
    module.table[...] = 1.0
    StepState.load(saved)
    assert module.margin == 0.5
    assert module.table == 0.5
