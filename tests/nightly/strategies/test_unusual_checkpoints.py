"""Checkpoints with what most runs don't have: values that are no dense tensors, strange tensors, no optimizers."""

import collections
import copy
import io
import os
import pickle
import sys
import threading
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch import nn

from lightning_memfit.memory.state_dicts import versions_in
from lightning_memfit.optim.states import FLOAT32_STEP
from lightning_memfit.strategies import checkpoints, integrity
from lightning_memfit.strategies.checkpoint_io import AtomicCheckpointIO
from lightning_memfit.strategies.checkpoints import read_run, rewritten
from lightning_memfit.strategies.data_parallel import DataParallelStrategy
from lightning_memfit.strategies.integrity import CheckpointError, stored_bytes, sync_folder, verify
from lightning_memfit.strategies.safe_loading import _Index, load
from lightning_memfit.strategies.saved_run import (
    PARAMETERS,
    VERSIONS,
    Pieces,
    SavedOptimizer,
    SavedRun,
    Undivided,
    check_shapes,
    check_versions,
    group_names,
    parameter_names,
    pieces_of,
)
from lightning_memfit.strategies.shards import META, _Folder, kept_whole, load_divided
from lightning_memfit.strategies.upstream.deepspeed import _divided, _fill, _Live, _weights
from tests.helpers.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def as_before():
    """Lightning's launcher writes ranks into the environment, where later tests would take them for a launcher's."""
    with patch.dict(os.environ):
        yield


class NoStorage(torch.Tensor):
    """A tensor that tells nothing of its memory, as some of other libraries."""

    def untyped_storage(self):
        raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")


SPARSE = torch.eye(3).to_sparse()


def test_the_room_of_any_tensor_is_estimated():
    assert stored_bytes(SPARSE) == 3 * 4 + 2 * 3 * 8
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2))
    assert stored_bytes([torch.zeros(4), csr]) == 16 + 2 * 4 + (3 + 2) * 8
    assert stored_bytes({"a": torch.zeros(5).as_subclass(NoStorage)}) == 20
    assert stored_bytes(torch.zeros(3, device="meta")) == 0


def test_a_file_keeps_what_is_no_dense_tensor(tmp_path):
    weights = {"w": torch.ones(2, 2), "b": SPARSE, "_extra_state": {"scale": 2, "history": torch.ones(3)}}
    AtomicCheckpointIO().save_checkpoint({"state_dict": weights, "optimizer_states": []}, tmp_path / "a.ckpt")
    read = AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert read["optimizer_states"] == []
    assert torch.equal(read["state_dict"]["w"], weights["w"])
    assert torch.equal(read["state_dict"]["b"].to_dense(), torch.eye(3))
    assert read["state_dict"]["_extra_state"]["scale"] == 2
    assert read["state_dict"]["_extra_state"]["history"].tolist() == [1, 1, 1]


def test_what_is_no_plain_container_keeps_its_kind(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    state = {"window": collections.deque([1], maxlen=2), "range": range(3), "plain": [(1, {"weight": weight})]}
    entries = {"state_dict": {"w": torch.ones(2), "layer._extra_state": state}, "callbacks": {"mine": state}}
    AtomicCheckpointIO().save_checkpoint(entries, tmp_path / "a.ckpt")
    loaded = AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    for found in (loaded["callbacks"]["mine"], loaded["state_dict"]["layer._extra_state"]):
        assert found["range"] == range(3)
        assert found["window"].maxlen == 2
        assert found["plain"][0][1]["weight"].is_leaf
        assert type(found["plain"][0][1]["weight"]) is nn.Parameter


def test_a_folder_keeps_what_is_no_tensor(tmp_path):
    weights = {"w": torch.ones(2, 2), "_extra_state": {"scale": 2, "history": torch.ones(3)}}
    dcp.save({"state_dict": weights}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"lr_schedulers": []}, tmp_path / META)
    saved = read_run(tmp_path)
    assert saved.optimizers == []
    assert saved.state_dict()["_extra_state"]["scale"] == 2
    place = ("state_dict", "_extra_state")
    read = _Folder(tmp_path).read({place: {}, ("state_dict", "w"): torch.zeros(2, 2)})
    assert read[place]["history"].tolist() == [1, 1, 1]
    assert read["state_dict", "w"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "state", [{"by": {0: 5, 3: 7}, "names": [], "pair": (1, 2), "empty": {}, "history": torch.ones(3)}, {}, None, 3]
)
def test_extra_states_come_back_as_they_were(tmp_path, state):
    """torch alone writes the leaves of dicts, with keys as text."""
    entries = {"w": torch.ones(2), "layer._extra_state": state}
    dcp.save({"state_dict": {k: kept_whole(k, v) for k, v in entries.items()}}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"lr_schedulers": []}, tmp_path / META)
    place = ("state_dict", "layer._extra_state")
    saved = read_run(tmp_path)
    for read in (saved.state_dict()["layer._extra_state"], _Folder(tmp_path).read({place: state})[place]):
        if isinstance(state, dict) and state:
            assert read.pop("history").tolist() == [1, 1, 1]
            read["history"] = state["history"]
        assert read == state
    assert "layer._extra_state" in _Folder(tmp_path).weights()


class Renewed(nn.Module):
    """Its weights were a hundredth of what they are now in its first version."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def renewed_of(path):
    module = nn.Sequential(Renewed())
    module.load_state_dict(read_run(path).named_as(module.state_dict()).state_dict())
    divided = nn.Sequential(Renewed())
    load_divided(path if path.is_dir() else read_run(path), divided, [], strict=True)
    assert torch.equal(divided[0].weight, module[0].weight)
    return module[0].weight.tolist()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("entries", "factor"), [(None, 1), (dict, 100)])
def test_a_file_keeps_the_versions_of_modules(tmp_path, entries, factor, compiled):
    saved = nn.Sequential(nn.Sequential(collections.OrderedDict(_orig_mod=Renewed())) if compiled else Renewed())
    state_dict = saved.state_dict()
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": entries(state_dict) if entries else state_dict}, path)
    assert renewed_of(path) == [factor, factor]
    if not compiled:  # torch does the same
        module = nn.Sequential(Renewed())
        module.load_state_dict(torch.load(path)["state_dict"])
        assert module[0].weight.tolist() == [factor, factor]
        module.load_state_dict(AtomicCheckpointIO().load_checkpoint(path)["state_dict"])
        assert module[0].weight.tolist() == [factor, factor]


@pytest.mark.parametrize(
    ("saved", "is_other"), [({"0": {"version": 1}}, True), ({"0": {"version": 2}}, False), ({}, False), (None, False)]
)
def test_weights_that_zero_would_not_change_to_a_module_s_new_format_are_refused(saved, is_other):
    found = pytest.raises(ValueError, match=r"weights of version 1 of '0'.* version 2") if is_other else nullcontext()
    with found:
        check_versions("a.ckpt", saved, nn.Sequential(Renewed()))


@pytest.mark.parametrize(("versions", "factor"), [(2, 1), (1, 100), (None, 1)])
def test_a_folder_keeps_the_versions_of_modules(tmp_path, versions, factor):
    module = nn.Sequential(Renewed())
    state_dict = module.state_dict()
    dcp.save({"state_dict": dict(state_dict)}, checkpoint_id=tmp_path, no_dist=True)
    known = dict(versions_in(module)) | {"0": {"version": versions}}
    torch.save({} if versions is None else {VERSIONS: known}, tmp_path / META)
    assert renewed_of(tmp_path) == [factor, factor]


@pytest.mark.parametrize(("extras", "optimizers"), [({"lr_schedulers": []}, []), ({}, None)])
def test_a_folder_without_optimizers_differs_from_one_of_weights_alone(tmp_path, extras, optimizers):
    dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    torch.save(extras, tmp_path / META)
    assert read_run(tmp_path).optimizers == optimizers


def test_a_tensor_beside_the_module_keeps_its_states(tmp_path):
    def made():
        module, alpha = nn.Linear(2, 2), torch.zeros(1, requires_grad=True)
        return module, alpha, torch.optim.Adam([{"params": module.parameters()}, {"params": [alpha], "lr": 0.5}])

    module, alpha, optimizer = made()
    (module(torch.ones(1, 2)).sum() * alpha.exp()).sum().backward()
    optimizer.step()
    names = group_names([optimizer], parameter_names(module, [optimizer]))
    assert names == [[["weight", "bias"], ["optimizer_0.2"]]]
    saved = SavedRun(tmp_path, {}, {PARAMETERS: names}, [optimizer.state_dict()])
    module, other, its = made()
    known = parameter_names(module, [its])
    (found,) = saved.named_optimizers(group_names([its], known))
    its.load_state_dict(found.state_dict(its.param_groups, known, numbered=True))
    assert torch.equal(its.state[other]["exp_avg"], optimizer.state[alpha]["exp_avg"])


class _Tempered(LightningModule):
    """Learns a temperature beside itself, as agents of reinforcement learning do, and keeps a dict in its state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.alpha = [torch.zeros(1, requires_grad=True)]  # no parameter of the module
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def training_step(self, batch, index):
        self.seen += 1
        return (self.layer(batch) * self.alpha[0].exp()).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam([*self.layer.parameters(), *self.alpha], lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, 2))


def test_ddp_resumes_a_module_with_a_tensor_beside_it_and_a_dict_in_its_state(tmp_path):
    def fitted(epochs, path=None):
        module = _Tempered()
        trainer = quiet_trainer(strategy=DataParallelStrategy(process_group_backend="gloo"), max_epochs=epochs)
        trainer.fit(module, ckpt_path=path)
        return module, trainer

    try:
        _, trainer = fitted(1)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        module, trainer = fitted(2, tmp_path / "a.ckpt")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert module.seen == 4
    assert trainer.optimizers[0].state[module.alpha[0]]["step"] == 4


class _Counting(torch.optim.SGD):
    """Keeps a number beside its groups and states."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


@pytest.mark.parametrize("strategy", [None, DataParallelStrategy])
def test_what_an_optimizer_keeps_beside_its_states_comes_back(tmp_path, strategy):
    def fitted(epochs, path=None):
        module = _Tempered()
        module.configure_optimizers = lambda: _Counting(module.layer.parameters())
        made = strategy(process_group_backend="gloo") if strategy else "auto"
        trainer = quiet_trainer(strategy=made, plugins=[AtomicCheckpointIO()], max_epochs=epochs)
        trainer.fit(module, ckpt_path=path)
        return trainer

    try:
        fitted(1).save_checkpoint(tmp_path / "a.ckpt")
        assert fitted(2, tmp_path / "a.ckpt").optimizers[0].count == 4
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_saved", [True, False])
def test_divided_modules_refuse_an_optimizer_with_more_than_states(tmp_path, is_saved):
    module = nn.Linear(2, 2)
    optimizer = _Counting(module.parameters())
    states = optimizer.state_dict() if is_saved else torch.optim.SGD(module.parameters(), lr=0.1).state_dict()
    weights = {name: pieces_of(torch.ones_like(value)) for name, value in module.state_dict().items()}
    before = module.weight.tolist()
    with pytest.raises(ValueError, match="_Counting keeps 'count' beside its groups and states"):
        load_divided(SavedRun(tmp_path, weights, {}, [states]), module, [optimizer], strict=True)
    assert module.weight.tolist() == before


def test_states_of_what_is_in_no_group_are_no_reason_to_refuse():
    """DeepSpeed leaves such in an optimizer, with which it can't write a state dict."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.state[nn.Parameter(torch.ones(2))] = {"step": torch.tensor(1.0)}
    states = dict(optimizer.state)
    SavedOptimizer([], {}, "a.ckpt").refuse_beside(optimizer)
    assert dict(optimizer.state) == states


def test_divided_modules_have_a_group_without_parameters(tmp_path):
    def made():
        module = nn.Linear(2, 2)
        return module, torch.optim.AdamW([{"params": module.parameters()}, {"params": []}], lr=0.1)

    module, optimizer = made()
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.7
    weights = {name: pieces_of(value) for name, value in module.state_dict().items()}
    saved = SavedRun(tmp_path, weights, {}, [optimizer.state_dict()])
    module, optimizer = made()
    load_divided(saved, module, [optimizer], strict=True)
    assert optimizer.param_groups[1]["lr"] == 0.7
    optimizer.step()


def test_other_shapes_are_refused_by_name():
    module = nn.BatchNorm1d(3)
    saved = {name: pieces_of(value) for name, value in module.state_dict().items()}
    check_shapes("a.ckpt", saved, module)
    for name, value in (("weight", torch.ones(4)), ("running_mean", torch.ones(1)), ("bias", torch.ones(1, 3))):
        with pytest.raises(ValueError, match=f"{name}.*shape"):
            check_shapes("a.ckpt", saved | {name: Pieces.of(value)}, module)


def test_a_divided_parameter_has_the_shape_of_the_whole():
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_shape = (2, 3)
    module = nn.Module()
    module.weight = parameter
    check_shapes("a.ckpt", {"weight": Pieces.of(torch.ones(2, 3))}, module)
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(2, 3\)"):
        check_shapes("a.ckpt", {"weight": Pieces.of(torch.ones(3, 2))}, module)


def test_a_new_parameter_keeps_its_part_of_the_master():
    flat = torch.arange(6.0)
    live = _Live(flat, [("old", 0, 0, 2), ("new", 2, 0, 3)], [("old", 2), ("new", 3)], {}, 0, 1)
    _fill(flat, live, {"old": Pieces.of(torch.full((2,), 9.0))}, keep_missing=True)
    assert flat.tolist() == [9, 9, 2, 3, 4, 0]


def test_a_changed_flag_is_a_damaged_file(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        content[archive.start_dir + 8] |= 1  # "encrypted" in the first entry of the directory
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        verify(path)


def test_what_ends_the_search_for_another_checkpoint_hides_nothing(tmp_path, monkeypatch):
    def fails(path):
        raise PermissionError

    monkeypatch.setattr(integrity, "last_good", fails)
    with pytest.raises(CheckpointError, match="doesn't exist"):
        verify(tmp_path / "a.ckpt")


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    def fails(descriptor):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(integrity.os, "fsync", fails)
    sync_folder(tmp_path)


def test_deepspeed_is_imported_for_its_own_files_alone(tmp_path, monkeypatch):
    torch.save({"a": 1}, tmp_path / "a.ckpt")
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.config", None)  # importing it fails
    assert load(tmp_path / "a.ckpt") == {"a": 1}


def test_an_index_of_python_3_13(tmp_path):
    assert (
        _Index(io.BytesIO(pickle.dumps(0)), tmp_path).find_class("pathlib._local", "PosixPath").__name__ == "PosixPath"
    )


def test_machines_that_share_a_folder_take_turns(tmp_path, monkeypatch):
    ranks, local, here, shown = 4, 2, threading.local(), {}
    wait = threading.Barrier(ranks, timeout=20)

    def gathered(value):
        shown[here.rank] = value
        wait.wait()
        values = [shown[rank] for rank in range(ranks)]
        wait.wait()
        return values

    for module in (checkpoints, integrity):
        monkeypatch.setattr(module, "place", lambda: (here.rank, ranks))
        monkeypatch.setattr(module, "gathered", gathered)
    errors = []

    def save(rank, number):
        here.rank = rank
        try:
            with rewritten(
                tmp_path / "a.ckpt", rank % local == 0, wait.wait, needed_bytes=rank % 2, share=(rank % local, local)
            ) as folder:
                folder.mkdir(exist_ok=True)
                (folder / f"weights{rank}").write_text(f"{number}")
                (folder / "latest").write_text("x")
        except Exception as error:
            errors.append(error)
            wait.abort()

    for number in range(5):
        threads = [threading.Thread(target=save, args=(rank, number)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        monkeypatch.setattr(here, "rank", 0, raising=False)
        assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
        assert (tmp_path / "a.ckpt" / "weights3").read_text() == f"{number}"
    assert sorted(path.name for path in (tmp_path / "a.ckpt").iterdir())[1:2] == ["memfit_manifest.json"]


def test_states_that_cannot_be_divided_are_refused_when_they_are_loaded(tmp_path):
    states = [{"state": {"w": {"scale": Undivided("scale", tmp_path)}}, "param_groups": []}]
    read = SavedRun(tmp_path, {"w": Pieces.of(torch.ones(2))}, {}, states).checkpoint()
    assert read["state_dict"]["w"].tolist() == [1, 1]
    assert len(read["optimizer_states"]) == 1
    with pytest.raises(ValueError, match="several parameters in one"):
        list(read["optimizer_states"])


@pytest.mark.parametrize("stage_3", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("saved", "message"),
    [({"other": torch.ones(2, 2)}, "has no"), ({"weight": torch.ones(4), "bias": torch.ones(2)}, "'weight' of shape")],
)
def test_zero_evaluates_no_other_module_s_weights(tmp_path, monkeypatch, stage_3, strict, saved, message):
    from lightning_memfit.strategies import zero

    taken = []
    module = nn.Linear(2, 2)
    module.strict_loading, module.trainer = strict, SimpleNamespace(state=SimpleNamespace(fn="validate"))
    weights = {name: pieces_of(value) for name, value in saved.items()}
    monkeypatch.setattr(zero, "read_by", lambda *_: SavedRun(tmp_path, weights, {}, None))
    strategy = SimpleNamespace(
        lightning_module=module,
        broadcast=lambda path: path,
        checkpoint_io=None,
        zero_stage_3=stage_3,
        _restore_zero_state=lambda whole, strict: taken.append(whole),
    )
    if not strict and "other" in saved:  # which is what the user asked for
        zero.ZeroStrategy.load_checkpoint(strategy, tmp_path)
        return
    with pytest.raises(ValueError, match=message):
        zero.ZeroStrategy.load_checkpoint(strategy, tmp_path)
    assert not taken


class Grown(nn.Module):
    """A module with a parameter that the saved run's had not, in the place of another of its shape."""

    def __init__(self, new="new", frozen=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_parameter(new, nn.Parameter(torch.zeros(2), requires_grad=not frozen))


def saved_by_the_old(tmp_path, has_names):
    """A run whose second parameter had another name; its file has the names of what was trained, or their numbers."""
    old = Grown("old")
    optimizer = torch.optim.AdamW(old.parameters())
    (old.weight.sum() + old.old.sum()).backward()
    optimizer.step()
    names = group_names([optimizer], parameter_names(old))
    weights = {name: pieces_of(value.detach() + 1) for name, value in old.named_parameters()}
    return SavedRun(tmp_path, weights, {PARAMETERS: names} if has_names else {}, [optimizer.state_dict()])


@pytest.mark.parametrize("has_names", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_zero_refuses_a_new_parameter_before_it_loads(tmp_path, monkeypatch, has_names, frozen):
    from lightning_memfit.strategies import zero

    taken = []
    module = Grown(frozen=frozen)
    optimizer = torch.optim.AdamW(parameter for parameter in module.parameters() if parameter.requires_grad)
    module.strict_loading, module.trainer = False, SimpleNamespace(state=SimpleNamespace(fn="fit"))
    monkeypatch.setattr(zero, "read_by", lambda *_: saved_by_the_old(tmp_path, has_names))
    monkeypatch.setattr(zero, "take_run", lambda *given: taken.append(given))
    strategy = SimpleNamespace(
        lightning_module=module,
        broadcast=lambda path: path,
        checkpoint_io=None,
        load_full_weights=False,
        deepspeed_engine=None,
        _hooks=None,
        _group_names=group_names([optimizer], parameter_names(module)),
    )
    if frozen and has_names:
        zero.ZeroStrategy.load_checkpoint(strategy, tmp_path)
        ((_, _, (found,)),) = taken
        assert found.states.keys() == {"weight", "old"}
        return
    reason = "groups of 2 parameters, this run of 1" if frozen else "no optimizer states for 'new'"
    with pytest.raises(ValueError, match=reason):
        zero.ZeroStrategy.load_checkpoint(strategy, tmp_path)
    assert not taken


@pytest.mark.parametrize("has_names", [False, True])
def test_divided_modules_refuse_a_new_parameter_before_they_load(tmp_path, has_names):
    module = Grown()
    optimizer = torch.optim.AdamW(module.parameters())
    saved = saved_by_the_old(tmp_path, has_names)
    with pytest.raises(ValueError, match="no optimizer states for 'new', which this run trains"):
        load_divided(saved, module, [optimizer], strict=False)
    assert module.weight.tolist() == [0, 0]


def test_weights_alone_load_beside_a_new_parameter(tmp_path):
    module = Grown()
    load_divided(saved_by_the_old(tmp_path, True), module, [], strict=False)
    assert module.weight.tolist() == pytest.approx([1, 1], abs=0.01)
    assert module.new.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "read"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.int64),
        (torch.complex64, torch.complex64),
    ],
)
def test_zero_reads_buffers_in_no_narrower_type(dtype, read):
    kept = torch.tensor([2**24 + 1]).to(dtype)
    model = {"module": {"count": kept, "frozen": kept}, "buffer_names": ["count"], "shared_params": {}}
    for value in _weights(2, [model], [], {}).values():
        assert value.parts[0][1].dtype is read
        assert torch.equal(value.whole().to(dtype), kept)


def test_zero_counts_what_it_writes(tmp_path, monkeypatch):
    from lightning_memfit.strategies import zero

    seen = []

    class Stop(Exception):
        pass

    def room(path, is_writer, barrier, mark, needed, share):
        seen.append(needed)
        raise Stop

    monkeypatch.setattr(zero, "rewritten", room)
    monkeypatch.setattr(zero, "checkpoint_bytes", lambda engine: 100)
    strategy = SimpleNamespace(
        lightning_module=nn.Linear(2, 2),
        _group_names=None,
        _hooks=None,
        deepspeed_engine=None,
        broadcast=lambda path: path,
        checkpoint_io=None,
        local_rank=0,
        num_processes=1,
        barrier=None,
    )
    checkpoint = {"state_dict": {"w": torch.ones(9)}, "optimizer_states": [torch.ones(9)], "mine": torch.ones(2)}
    with pytest.raises(Stop):
        zero.ZeroStrategy.save_checkpoint(strategy, checkpoint, tmp_path / "a.ckpt")
    assert seen == [108]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b.weight": {}, "b.bias": {}}, "has no state 'exp_avg' for 'b.weight', 'b.bias', which no step"),
        ({"b.bias": {"exp_avg": torch.ones(4), "step": torch.tensor(2.0)}}, "has a state 'step' for 'b.bias' that is"),
    ],
)
def test_the_parameters_whose_states_zero_cannot_keep_are_named(tmp_path, changes, message):
    names = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight"]
    states = {name: {"exp_avg": torch.ones(4), "step": torch.tensor(1.0)} for name in names} | changes
    live = _Live(
        torch.zeros(20), [(name, 4 * i, 0, 4) for i, name in enumerate(names)], [(n, 4) for n in names], {}, 0, 1
    )
    with pytest.raises(ValueError, match=message) as refused:
        _divided(live, SavedOptimizer([], states, tmp_path))
    assert "a.weight" not in str(refused.value)


def resumed_under_ddp(saved, module, optimizer):
    strategy = DataParallelStrategy(parallel_devices=[torch.device("cpu")])
    strategy._lightning_module, strategy.optimizers, strategy._loaded = module, [optimizer], saved
    strategy.load_optimizer_state_dict({"optimizer_states": saved.optimizers})


def test_states_of_a_folder_lie_as_the_weights_of_ddp_do(tmp_path):
    """Fused kernels on the CPU walk through memory, and a folder has moments without memory formats."""

    def stepped(module, optimizer):
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        return module

    def made():
        torch.manual_seed(0)
        module = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)

    module, optimizer = made()
    stepped(module, optimizer)
    names = group_names([optimizer], parameter_names(module))
    states = copy.deepcopy(optimizer.state_dict())
    for state in states["state"].values():
        state.update({key: pieces_of(value) for key, value in state.items() if value.dim()})
    saved = SavedRun(tmp_path, {}, {PARAMETERS: names}, [states])
    again, its_optimizer = made()
    again.load_state_dict(module.state_dict())
    resumed_under_ddp(saved, again, its_optimizer)
    assert torch.equal(stepped(again, its_optimizer).weight, stepped(module, optimizer).weight)


def test_ddp_refuses_states_that_its_optimizer_cannot_step(tmp_path):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}
    states = optimizer.state_dict() | {"state": {0: state}, FLOAT32_STEP: {"rounding": "kahan"}}
    with pytest.raises(ValueError, match="Kahan compensation"):
        resumed_under_ddp(SavedRun(tmp_path, {}, {}, [states]), module, optimizer)
    narrow = {"step": 1, "state1": torch.ones(2, 2, dtype=torch.uint8), "state2": torch.ones(2, 2, dtype=torch.uint8)}
    saved = SavedRun(tmp_path, {}, {}, [states | {"state": {0: narrow}, FLOAT32_STEP: {}}])
    with pytest.raises(ValueError, match="none that torch.AdamW can step"):
        resumed_under_ddp(saved, module, optimizer)
    assert not optimizer.state
