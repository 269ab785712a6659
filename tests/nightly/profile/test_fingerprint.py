"""What the key of a cached profile depends on: all that decides the trace, and nothing else."""

import copy
import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy
import pytest
import torch

from lightning_memfit.profile import cache as cache_module
from lightning_memfit.profile import fingerprint
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.cache import ProfileCache, profile_key
from lightning_memfit.profile.fake import turn_fake
from lightning_memfit.profile.fake_mode import TracingFakeMode
from lightning_memfit.profile.integers import RealIntegers
from lightning_memfit.profile.process import run
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation, TraceError
from tests.truth.profile.modules import Classifier, batch

SOURCE = """
import torch, lightning.pytorch as pl
from {name}_helper import factor
class Net(pl.LightningModule):
    def __init__(self, rate=0.1, activation=torch.relu):
        super().__init__()
        self.layer, self.rate, self.activation = torch.nn.Linear(3, 3), rate, activation
    def training_step(self, batch, batch_idx):
        return self.layer(batch["x"]).mean() * factor()
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write a user's module and its helper into a folder, import them, and give its class."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which another file of the same second and size would get

    def load(source=SOURCE, helper="def factor(): return 1", name="users_net", folder=tmp_path):
        folder.mkdir(exist_ok=True)
        for part, text in ((f"{name}_helper", helper), (name, source.format(name=name))):
            path = folder / f"{part}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(part, path)
            sys.modules[part] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        fingerprint._file_hash.cache_clear()
        return module.Net

    yield load
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


DATA = {"x": torch.randn(2, 3), "ids": torch.tensor([1, 2])}


def key(module, data=DATA, *settings):
    return profile_key(module, data, *settings)


def test_equal_modules_have_one_key(load):
    net = load()
    assert key(net()) == key(net()) == key(load()())


def test_the_key_changes_with_the_source_of_the_class_and_of_what_it_imports(load):
    first = key(load()())
    assert key(load(SOURCE.replace(".mean()", ".sum()"))()) != first
    assert key(load(helper="def factor(): return 2")()) != first
    assert key(load()()) == first


def test_a_folder_named_like_a_library_hides_nothing(load, tmp_path):
    folder = tmp_path / "lightning"
    first = key(load(folder=folder)())
    assert key(load(SOURCE.replace(".mean()", ".sum()"), folder=folder)()) != first


def test_the_key_changes_with_what_the_module_holds(load):
    net = load()
    changes = [
        lambda net: net(rate=0.2),
        lambda net: net(activation=torch.sigmoid),
        lambda net: net(activation=functools.partial(torch.softmax, dim=0)),
        lambda net: net(activation=functools.partial(torch.softmax, dim=1)),
        lambda net: net(activation=torch.nn.functional.gelu),
        lambda net: net(activation=lambda x: x),
        lambda net: net(activation=lambda x: x + 1),
        lambda net: net(activation=torch.nn.GELU),
        lambda net: net().bfloat16(),
        lambda net: net().requires_grad_(False),
        lambda net: net().eval(),
    ]
    keys = {key(change(net)) for change in changes for _ in range(2)} | {key(net())}
    assert len(keys) == len(changes) + 1


@pytest.mark.parametrize(
    "data",
    [
        {"x": torch.randn(3, 3), "ids": DATA["ids"]},
        {"x": torch.randn(2, 3).double(), "ids": DATA["ids"]},
        {"x": torch.randn(2, 3), "ids": torch.tensor([1, 3])},
        {"x": torch.randn(2, 3)},
        {"x": torch.randn(2, 3), "ids": DATA["ids"], "flag": True},
    ],
    ids=["shape", "dtype", "integers", "fields", "value"],
)
def test_the_key_changes_with_the_batch(load, data):
    assert key(load()(), data) != key(load()())


def test_floats_of_the_batch_do_not_matter(load):
    assert key(load()(), {**DATA, "x": torch.randn(2, 3)}) == key(load()())


def test_the_key_changes_with_settings_and_versions(load, monkeypatch):
    module = load()()
    keys = {
        key(module, DATA, StepOptions(), Emulation()),
        key(module, DATA, StepOptions("bf16-mixed"), Emulation()),
        key(module, DATA, StepOptions(accumulate_grad_batches=2), Emulation()),
        key(module, DATA, StepOptions(), Emulation("cpu")),
        key(module, DATA, StepOptions(), Emulation(capability=(9, 0))),
    }
    assert len(keys) == 5
    monkeypatch.setattr(cache_module, "package_versions", lambda: {"torch": "0.1"})
    keys.add(key(module, DATA, StepOptions(), Emulation()))
    monkeypatch.setattr(cache_module, "own_code", lambda: "another")
    keys.add(key(module, DATA, StepOptions(), Emulation()))
    assert len(keys) == 7


def test_another_process_has_the_same_key(load, tmp_path):
    load()  # writes the module's file
    script = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        from lightning_memfit.profile.cache import profile_key
        from users_net import Net
        torch.manual_seed(int(sys.argv[1]))
        data = {{"x": torch.randn(2, 3), "ids": torch.tensor([1, 2])}}
        print(profile_key(Net(rate=0.3), data))
        """
    )
    keys = set()
    for seed in ("77", "99"):  # this process may have switched something of torch's, which is in the key
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-c", script, seed]
        found = subprocess.run(line, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        keys.add(found.stdout.split()[-1])
    assert len(keys) == 1
    assert keys != {"None"}


def test_long_texts_are_no_paths():
    module = torch.nn.Linear(1, 1)
    module.prompt = "a question " * 60  # longer than any file name may be
    assert fingerprint.describe_module(module) == fingerprint.describe_module(module)


class Hostile:
    """Answers every question about it with an error, and counts them."""

    asked = 0

    def _refuse(self, *_, **__):
        Hostile.asked += 1
        raise RuntimeError("nobody may ask")

    __getattr__ = __eq__ = __hash__ = __repr__ = __str__ = __len__ = __iter__ = __bool__ = __call__ = _refuse
    __deepcopy__ = __reduce_ex__ = _refuse
    __class__ = shape = dtype = items = keys = to_dict = untyped_storage = property(_refuse)


class Eager(Hostile):
    def __getattribute__(self, name):
        return object.__getattribute__(self, "_refuse")()


class AnswersAnything:
    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return 1


class Slotted:
    __slots__ = ("rate", "unset")

    def __init__(self, rate):
        self.rate = rate


class Text(str):
    __slots__ = ()

    def __repr__(self):
        raise RuntimeError("no text")


class OddDict(dict):
    def items(self):
        raise RuntimeError("no items")

    __iter__ = keys = values = items


def circular():
    value = types.SimpleNamespace()
    value.itself, value.more = value, [value] * 20
    return value


def empty_cell():
    def function():
        return later

    if False:
        later = 1
    return function


ODD = {
    "items is a list": lambda: types.SimpleNamespace(items=[1, 2]),
    "named like a tensor": lambda: types.SimpleNamespace(
        untyped_storage=1, shape="no", dtype=None, is_floating_point=0
    ),
    "named like a module": lambda: types.SimpleNamespace(named_modules=3),
    "named like a function": lambda: types.SimpleNamespace(__code__=3, __closure__=5),
    "hostile": Hostile,
    "eager": Eager,
    "in containers": lambda: {"a": [Hostile(), (Eager(),)], Slotted(1): {1: Text("a")}},
    "answers anything": AnswersAnything,
    "slots": lambda: Slotted(0.5),
    "text": lambda: Text("a"),
    "dict": lambda: OddDict(a=1),
    "circular": circular,
    "empty cell": empty_cell,
    "huge": lambda: types.SimpleNamespace(text="x" * 10_000_000),
    "address": lambda: types.SimpleNamespace(thing=object(), lock=threading.Lock(), generator=torch.Generator()),
    "array": lambda: numpy.arange(3),
}


@pytest.mark.parametrize("name", ODD)
def test_nothing_on_a_users_object_is_called(name, load):
    net = load()
    keys, before = set(), Hostile.asked
    for _ in range(2):
        module = net()
        vars(module)["cfg"] = ODD[name]()  # `nn.Module` would ask it for its class
        keys.add(key(module))
    assert None not in keys
    assert len(keys) == 1
    assert Hostile.asked == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Slotted(1), Slotted(2)),
        (types.SimpleNamespace(items=[1]), types.SimpleNamespace(items=[2])),
        (Text("a"), Text("b")),
        (OddDict(a=1), OddDict(a=2)),
        (numpy.zeros(3), numpy.zeros(4)),
        (Path("a"), Path("b")),
        ([lambda: lambda: 1], [lambda: lambda: 2]),
    ],
    ids=["slots", "namespace", "text", "dict", "array", "path", "nested function"],
)
def test_what_an_object_stores_counts(one, other, load):
    module, keys = load()(), []
    for value in (one, other, one):
        module.cfg = value
        str(value) if isinstance(value, Path) else None  # a path keeps its text
        keys.append(key(module))
    assert keys[0] == keys[2] != keys[1]


def test_what_cannot_be_described_is_traced_and_not_kept(tmp_path):
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_, **__):
            raise RuntimeError("no questions")

    module = torch.nn.Linear(1, 1)
    module.odd = torch.ones(2).as_subclass(Refusing)
    assert profile_key(module, DATA) is None
    module.odd = [0] * (fingerprint._MAX_ITEMS + 1)
    assert profile_key(module, DATA) is None


def test_a_module_with_an_odd_attribute_is_profiled(tmp_path):
    module = Classifier()
    module.cfg = types.SimpleNamespace(items=[1, 2])
    cache = ProfileCache(tmp_path)
    first = profile_module(module, batch(), any_micro_batch=False, cache=cache)
    assert profile_module(module, batch(), any_micro_batch=False, cache=cache).seconds == first.seconds


# --- what code reads besides the attributes of its module -------------------------------------------------------------


def plain_step(net, data):
    return net.layer(data["x"]).mean()


def wide_step(net, data):
    return net.layer(data["x"] * 2).mean()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)


class Settings:
    width = 1


class Holder:
    def __init__(self, width=1):
        self.width = width


WIDE = False
TABLE = {"width": 1}
HOLDER = Holder()
TEACHER = torch.nn.Linear(3, 3)
CHOICES = types.ModuleType("users_choices")
CHOICES.width = 1
DEEP = [[[[[[[[[[[[{"width": 1}]]]]]]]]]]]]


def closure_flag(wide):
    class Made(Net):
        def training_step(self, data, index):
            return (wide_step if wide else plain_step)(self, data)

    return Made()


def closure_function(wide):
    step = wide_step if wide else plain_step
    return type("Made", (Net,), {"training_step": lambda self, data, index: step(self, data)})()


def default(wide):
    class Made(Net):
        def training_step(self, data, index, *, width=2 if wide else 1):
            return self.layer(data["x"] * width)

    return Made()


def own_class(wide):
    class Made(Net):
        width = 2 if wide else 1

        def training_step(self, data, index):
            return self.layer(data["x"] * Made.width)

    return Made()


def function_on_a_class(wide):
    class Made(Net):
        def training_step(self, data, index):
            return Made.step(self, data)

    Made.step = staticmethod(wide_step if wide else plain_step)
    return Made()


def reads(change):
    """A module of one class, whose methods read globals, after a change to these."""

    class Made(Net):
        def training_step(self, data, index):
            return self.layer(data["x"] * self.factor())

        def factor(self):
            return inner_factor() + TEACHER.out_features + DEEP[0][0][0][0][0][0][0][0][0][0][0][0]["width"]

    change()
    return Made()


def inner_factor():
    return (2 if WIDE else 1) * TABLE["width"] * Settings.width * HOLDER.width * CHOICES.width


def reads_environment(wide):
    class Made(Net):
        def training_step(self, data, index):
            return (wide_step if os.environ.get("USERS_WIDE") else plain_step)(self, data)

    os.environ["USERS_WIDE"] = "1" if wide else ""
    return Made()


READ = {
    "global": (sys.modules[__name__], "WIDE", True),
    "global dict": (TABLE, "width", 2),
    "other class": (Settings, "width", 2),
    "global object": (HOLDER, "width", 2),
    "attribute of a module": (CHOICES, "width", 2),
    "global module": (sys.modules[__name__], "TEACHER", torch.nn.Linear(3, 4)),
    "deep": (DEEP[0][0][0][0][0][0][0][0][0][0][0][0], "width", 2),
    "function": (sys.modules[__name__], "inner_factor", lambda: 3),
    "library's class": (torch.nn.Linear, "forward", lambda self, x: x),
    "attribute of a library's class": (torch.nn.Linear, "users_width", 2),
}


@pytest.mark.parametrize("make", [closure_flag, closure_function, default, own_class, function_on_a_class])
def test_what_a_class_was_made_with_counts(make):
    assert key(make(False)) == key(make(False)) != key(make(True)) != None  # noqa: E711


@pytest.mark.parametrize("name", READ)
def test_what_code_reads_outside_of_its_module_counts(name, monkeypatch):
    owner, attribute, value = READ[name]
    before = key(reads(lambda: None))
    assert before == key(reads(lambda: None)) is not None
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, attribute, value)
    else:
        monkeypatch.setattr(owner, attribute, value, raising=False)
    assert key(reads(lambda: None)) not in (before, None)


def test_the_environment_counts_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("USERS_WIDE", "")
    keys = [key(reads_environment(wide)) for wide in (False, True, False)]
    assert keys[0] == keys[2] != keys[1]
    plain = key(closure_flag(False))
    monkeypatch.setenv("USERS_WIDE", "another")
    assert key(closure_flag(False)) == plain


def test_callbacks_and_makers_of_optimizers_count(load):
    def hook(width):
        return lambda *_: torch.ones(width)

    module = load()()
    for make in (hook, lambda width: pl.callbacks.LambdaCallback(on_train_batch_end=hook(width))):
        assert key(module, DATA, make(1)) == key(module, DATA, make(1)) != key(module, DATA, make(2))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_count(register, load):
    def hooked(width):
        module = load()()
        getattr(module.layer.weight, register)(lambda _: torch.ones(width) and None)
        return key(module)

    assert hooked(1) == hooked(1) != hooked(2)


UNKNOWN = iter([1, 2])


def test_nothing_is_kept_where_it_can_not_be_told_what_is_read(tmp_path):
    class Counts(Classifier):
        def training_step(self, data, index):
            return super().training_step(data, index) * (UNKNOWN is not None)

    class ReadsAnything(Classifier):
        def training_step(self, data, index):
            return super().training_step(data, index) * len(globals())

    for kind in (Counts, ReadsAnything):
        cache = ProfileCache(tmp_path)
        assert profile_key(kind(), batch()) is None
        profile_module(kind(), batch(), any_micro_batch=False, cache=cache)
        assert not cache.folder.exists()


def test_a_refusal_is_not_skipped_for_another_ones_profile(tmp_path):
    def make(writes):
        class Made(Classifier):
            def training_step(self, data, index):
                if writes:
                    (tmp_path / "losses.txt").write_text("x")
                return super().training_step(data, index)

        return Made()

    cache = ProfileCache(tmp_path / "cache")
    profile_module(make(False), batch(), any_micro_batch=False, cache=cache)
    assert list(cache.folder.iterdir())
    with pytest.raises(TraceError, match="losses"):
        profile_module(make(True), batch(), any_micro_batch=False, cache=cache)


def test_code_that_reads_itself_is_described(load):
    def make(width):
        def step(data):
            return width + len(again)

        again = [step]
        again.append(again)
        module = load()()
        module.step = step
        return module

    assert key(make(1)) == key(make(1)) not in (key(make(2)), None)


# --- what a trace takes over of tensors, and of the process -----------------------------------------------------------


def module_with(**changes):
    """A module after changes to its tensors."""
    module = torch.nn.Module()
    module.one, module.other = torch.nn.Conv2d(2, 2, 3), torch.nn.Conv2d(2, 2, 3)
    module.register_buffer("turns", torch.tensor(2))
    module.scale, module.rows = torch.tensor(0.5), torch.zeros(4, 3)
    for name, value in changes.items():
        if name == "tied":
            module.other.weight = module.one.weight
        elif name == "shared":
            module.other.weight = torch.nn.Parameter(module.one.weight.detach())
        elif name == "format":
            module.to(memory_format=value)
        else:
            setattr(module, name, value)
    return module


TENSORS = [
    {},
    {"tied": True},
    {"format": torch.channels_last},
    {"turns": torch.tensor(12)},
    {"turns": torch.tensor([2])},
    {"turns": torch.nn.Parameter(torch.tensor(2.0))},
    {"turns": torch.nn.Parameter(torch.tensor(2), requires_grad=False)},
    {"scale": torch.tensor(0.25)},
    {"scale": torch.tensor(0.5, dtype=torch.float64)},
    {"scale": torch.tensor(0.5, requires_grad=True)},
    {"scale": torch.tensor(float("nan"))},
    {"rows": torch.zeros(3).expand(4, 3)},
    {"rows": torch.zeros(3, 4).t()},
    {"rows": torch.zeros(4, 3, requires_grad=True)},
]


def taken_over(module):
    """What a trace knows of a module's tensors, which become fakes: each one's number, and facts where it occurs."""
    fake_mode = TracingFakeMode(allow_non_fake_inputs=True)
    integers = RealIntegers(fake_mode)
    module = copy.deepcopy(module)  # its tensors are those of others, too
    turn_fake(module, fake_mode, integers.remember_counter)
    named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    numbers, facts = {}, []
    for name, one in {**named, "scale": module.scale, "rows": module.rows}.items():
        value = integers.value_of(one)
        kind = isinstance(one, torch.nn.Parameter), one.shape, one.stride(), one.dtype, one.requires_grad
        number = numbers.setdefault(id(one), len(numbers))
        facts.append((name, number, *kind, None if value is None else repr(value.item())))
    return repr(facts)


def test_all_that_a_trace_takes_over_of_tensors_counts():
    made = [[module_with(**changes) for _ in range(2)] for changes in TENSORS]
    keys = [{key(one) for one in pair} for pair in made]
    facts = [{taken_over(one) for one in pair} for pair in made]
    assert all(len(one) == 1 for one in (*facts, *keys))  # equal ones are alike
    assert len(set.union(*facts)) == len(set.union(*keys)) == len(TENSORS)


def test_weights_of_one_storage_are_told_apart_from_others():
    assert key(module_with(shared=True)) == key(module_with(shared=True)) != key(module_with())


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(1, 3, 4, 4).expand(2, 3, 4, 4)],
    ids=["channels last", "expanded"],
)
def test_strides_of_the_batch_count(other):
    assert key(module_with(), torch.zeros(2, 3, 4, 4)) != key(module_with(), other)


def test_values_that_no_copy_replaces_count():
    """Tensors that code holds are real in a trace, and arrays are copied with their values."""

    def module_of(sizes):
        class Made(Net):
            def training_step(self, data, index):
                return self.layer(data["x"]) * int(sizes[1])

        return Made()

    for one, other in (((1, 2), (1, 3)), ((0.5, 0.5), (0.5, 0.75))):
        keys = [key(module_of(torch.tensor(values))) for values in (one, other, one)]
        assert keys[0] == keys[2] != keys[1]
        modules = [module_with(array=numpy.array(values)) for values in (one, other, one)]
        assert key(modules[0]) == key(modules[2]) != key(modules[1])
    objects = [module_with(array=numpy.array([name, None], dtype=object)) for name in ("a", "b", "a")]
    assert key(objects[0]) == key(objects[2]) != key(objects[1])


SPARSE = {
    "coo": lambda rows: rows.to_sparse(),
    "uncoalesced": lambda rows: torch.sparse_coo_tensor(rows.nonzero().t(), rows[rows != 0], rows.shape),
    "csr": lambda rows: rows.to_sparse_csr(),
    "csc": lambda rows: rows.to_sparse_csc(),
    "bsr": lambda rows: rows.to_sparse_bsr((2, 2)),
    "bsc": lambda rows: rows.to_sparse_bsc((2, 2)),
}


def sparse_rows(kind="coo", num_values=4, dtype=torch.float32):
    """A sparse tensor of 4 x 4 with so many values, one after another on the diagonal."""
    rows = torch.diag((torch.arange(4) < num_values).to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls compressed layouts a beta
        return SPARSE[kind](rows)


def test_sparse_tensors_of_a_module_are_described():
    def module_of(**changes):
        module = module_with(rows=sparse_rows(**changes))
        module.register_buffer("links", sparse_rows(**changes))
        return module

    changes = [{"kind": kind} for kind in SPARSE] + [{"num_values": 3}, {"dtype": torch.float64}]
    keys = [{key(module_of(**one)) for _ in range(2)} for one in changes]
    assert all(len(one) == 1 and None not in one for one in keys)
    assert len(set.union(*keys)) == len(changes)


@pytest.mark.parametrize("kind", SPARSE)
def test_values_of_sparse_tensors_that_code_holds_count(kind):
    def module_of(links):
        class Made(Net):
            def training_step(self, data, index):
                return torch.sparse.mm(links, self.layer(data["x"])).mean()

        return Made()

    one, other = sparse_rows(kind), sparse_rows(kind)
    other.values().mul_(2) if kind != "uncoalesced" else other._values().mul_(2)
    keys = [key(module_of(links)) for links in (one, other, sparse_rows(kind))]
    assert keys[0] == keys[2] != keys[1]
    assert None not in keys


SWITCHES = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "efficient": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "cudnn attention": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "math": lambda: torch.backends.cuda.enable_math_sdp(False),
    "precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "oneDNN": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.filterwarnings("ignore")
def test_settings_of_the_process_count(name):
    module = module_with()

    def changed():
        SWITCHES[name]()
        return key(module)

    assert run(changed) not in (key(module), None)
    assert run(partial(key, module)) == key(module)


def test_a_number_that_decides_the_step_is_not_taken_from_another_ones_profile(tmp_path):
    class Turns(Classifier):
        def __init__(self, turns):
            super().__init__()
            self.register_buffer("turns", torch.tensor(turns))

        def training_step(self, data, index):
            return sum(super(Turns, self).training_step(data, index) for _ in range(int(self.turns)))

    cache = ProfileCache(tmp_path)
    peaks = [
        profile_module(Turns(turns), batch(), any_micro_batch=False, cache=cache).events.live_bytes().max()
        for turns in (1, 4)
    ]
    assert peaks[1] > peaks[0]
