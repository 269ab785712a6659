"""What the key of a cached profile depends on: all that decides the trace, and nothing else."""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import numpy
import pytest
import torch

from lightning_memfit.profile import cache as cache_module
from lightning_memfit.profile import fingerprint
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.cache import ProfileCache, profile_key
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation

from .modules import Classifier, batch

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


@pytest.mark.slow
def test_another_process_has_the_same_key(load, tmp_path):
    mine = key(load()(rate=0.3))
    script = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        from lightning_memfit.profile.cache import profile_key
        from users_net import Net
        torch.manual_seed(99)
        data = {{"x": torch.randn(2, 3), "ids": torch.tensor([1, 2])}}
        print(profile_key(Net(rate=0.3), data))
        """
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert found.stdout.split()[-1] == mine


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
