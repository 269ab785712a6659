"""What the key of a cached profile depends on."""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
import types

import lightning.pytorch as pl
import numpy
import pytest
import torch

from lightning_memfit.profile import cache as cache_module
from lightning_memfit.profile import fingerprint
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.cache import ProfileCache, profile_key
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
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
        fingerprint._read.cache_clear()
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


@pytest.mark.nightly
def test_another_process_has_the_same_key(load, tmp_path):
    load()  # writes the module's file
    script = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        from lightning_memfit.profile.cache import profile_key
        from transformers import GPT2Config, GPT2LMHeadModel
        from users_net import Net
        torch.manual_seed(int(sys.argv[1]))
        data = {{"x": torch.randn(2, 3), "ids": torch.tensor([1, 2])}}
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10))
        print(profile_key(Net(rate=0.3), data), profile_key(gpt2, data))
        """
    )
    keys = set()
    for seed in ("77", "99"):  # this process may have switched something of torch's, which is in the key
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-c", script, seed]
        found = subprocess.run(line, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        keys.add(found.stdout.splitlines()[-1])
    assert len(keys) == 1
    assert "None" not in keys.pop()


def test_what_cannot_be_pickled_is_traced_and_not_kept(tmp_path):
    module = Classifier()
    module.words = iter(["no", "pickle"]), (word for word in "ab")
    cache = ProfileCache(tmp_path)
    assert profile_key(module, batch()) is None
    assert profile_module(module, batch(), any_micro_batch=False, cache=cache).micro_batch_size == 32
    assert not list(tmp_path.rglob("*.npz"))
    module.words = [[] for _ in range(fingerprint._MAX_ITEMS + 1)]
    assert profile_key(module, batch()) is None


def test_a_class_without_a_source_file_is_not_kept():
    """One of an interactive session, whose source can't be told."""
    made = types.new_class("Made", (Classifier,), exec_body=lambda space: space.update(__module__="users_session"))
    assert profile_key(made(), DATA) is None


def test_a_module_with_an_odd_attribute_is_profiled(tmp_path):
    module = Classifier()
    module.cfg = types.SimpleNamespace(items=[1, 2])
    cache = ProfileCache(tmp_path)
    first = profile_module(module, batch(), any_micro_batch=False, cache=cache)
    assert profile_module(module, batch(), any_micro_batch=False, cache=cache).seconds == first.seconds


# --- what code reads besides the attributes of its module -------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)


def test_a_class_that_a_function_makes_is_not_kept():
    class Made(Net):
        pass

    assert key(Made()) is None


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
    {"shared": True},
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


def test_all_that_a_trace_takes_over_of_tensors_counts():
    keys = [{key(module_with(**changes)) for _ in range(2)} for changes in TENSORS]
    assert all(len(one) == 1 for one in keys)  # equal ones are alike
    assert len(set.union(*keys)) == len(TENSORS)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(1, 3, 4, 4).expand(2, 3, 4, 4)],
    ids=["channels last", "expanded"],
)
def test_strides_of_the_batch_count(other):
    assert key(module_with(), torch.zeros(2, 3, 4, 4)) != key(module_with(), other)


def test_values_that_no_copy_replaces_count():
    """Integers that code holds are real in a trace, and arrays have their values there."""

    def module_of(sizes):
        return module_with(times=lambda values: values * int(sizes[1]))

    one, other = (1, 2), (1, 3)
    keys = [key(module_of(torch.tensor(values))) for values in (one, other, one)]
    assert keys[0] == keys[2] != keys[1]
    modules = [module_with(array=numpy.array(values)) for values in (one, other, one)]
    assert key(modules[0]) == key(modules[2]) != key(modules[1])
    objects = [module_with(array=numpy.array([name, None], dtype=object)) for name in ("a", "b", "a")]
    assert key(objects[0]) == key(objects[2]) != key(objects[1])


def test_settings_of_torch_count(monkeypatch):
    module = module_with()
    before = key(module)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert key(module) not in (before, None)
