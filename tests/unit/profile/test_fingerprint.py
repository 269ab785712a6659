"""What the key of a cached profile depends on: all that decides the trace, and nothing else."""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from lightning_memfit.profile import cache as cache_module
from lightning_memfit.profile import fingerprint
from lightning_memfit.profile.cache import profile_key
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation

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
