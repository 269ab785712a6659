import json

import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memfit.memory.cache_files import tell_once
from lightning_memfit.profile import fingerprint
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.cache import ProfileCache, default_cache_folder
from lightning_memfit.profile.trace import Emulation

from .modules import Classifier, batch


def count_traces(monkeypatch):
    from lightning_memfit.profile import build

    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    original = build.trace_step
    monkeypatch.setattr(build, "trace_step", counted)
    return calls


@pytest.mark.parametrize("damage", [b"", b"no zip at all", b"PK\x03\x04 cut off", None])
def test_a_file_that_can_not_be_read_is_traced_anew(tmp_path, monkeypatch, damage):
    calls = count_traces(monkeypatch)

    def profile():
        return profile_module(Classifier(), batch(), any_micro_batch=False, cache=ProfileCache(tmp_path))

    first = profile()
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.suffix == ".npz"
    if damage is None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(damage)
    second = profile()
    third = profile()
    assert len(calls) == 2
    assert second.events.events.tolist() == third.events.events.tolist() == first.events.events.tolist()
    assert third.seconds == second.seconds
    assert list((tmp_path / "profiles").iterdir()) == [path]


def rewrite(path, change):
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    change(arrays)
    np.savez_compressed(path, **arrays)


def other_header(arrays):
    arrays["header"] = np.array(json.dumps(["a", "list"]))


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (exec, (f"open({str(self.marker)!r}, 'w')",))


def test_entries_of_another_form_are_not_believed(tmp_path, monkeypatch):
    calls = count_traces(monkeypatch)
    marker = tmp_path / "ran"

    def hidden(arrays):
        arrays["sizes"] = np.array([Payload(marker)], dtype=object)

    def peak():
        profile = profile_module(Classifier(), batch(), any_micro_batch=False, cache=ProfileCache(tmp_path))
        return int(profile.events.live_bytes().max())

    true = peak()
    (path,) = (tmp_path / "profiles").iterdir()
    for number, change in enumerate((other_header, hidden), 2):
        rewrite(path, change)
        tell_once.cache_clear()
        with pytest.warns(UserWarning, match=r"npz is not used"):
            assert peak() == true
        assert len(calls) == number
    assert peak() == true
    assert len(calls) == 3  # the last one was replaced
    assert not marker.exists()


def test_refused_steps_are_not_kept(tmp_path):
    class Refused(Classifier):
        def training_step(self, batch, batch_idx):
            return batch["x"][batch["x"] > 0].mean() + self.loss(batch)

    with pytest.raises(RuntimeError):
        profile_module(Refused(), batch(), cache=ProfileCache(tmp_path))
    assert not (tmp_path / "profiles").exists()


def test_the_folder_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEMFIT_CACHE", raising=False)
    assert default_cache_folder() == tmp_path / "lightning-memfit"
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "mine"))
    assert default_cache_folder() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(("device", "expected"), [("cpu", 3), ("cuda", 1)])
def test_only_the_key_of_a_trace_for_the_cpu_changes_with_the_processor(monkeypatch, device, expected):
    """What convolutions take there is learned from the processor."""
    keys, known = set(), object()
    monkeypatch.setattr(ProfileCache, "load", lambda cache, key: keys.add(key) or known)

    def look_up():
        assert profile_module(Classifier(), batch(), emulation=Emulation(device), cache=ProfileCache()) is known

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    look_up()
    look_up()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    look_up()
    monkeypatch.setattr(fingerprint, "_processor", lambda: "another")
    look_up()
    assert len(keys) == expected


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_key_of_a_trace_changes_with_the_kernels_for_attention(monkeypatch, device):
    keys = set()
    monkeypatch.setattr(ProfileCache, "load", lambda cache, key: keys.add(key) or object())
    for kernels in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], SDPBackend.MATH):
        with sdpa_kernel(kernels):
            profile_module(Classifier(), batch(), emulation=Emulation(device), cache=ProfileCache())
    assert len(keys) == 2
