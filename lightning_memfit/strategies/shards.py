"""Parameters that are divided among ranks: read folders that FSDP2 writes, and load any checkpoint into them.

A folder is a distributed checkpoint of torch and one file with what Lightning saves besides. torch itself reads both by
unpickling whatever they hold; here only tensors and plain values are read. Optimizer states go to parameters by name,
whatever groups they were in.
"""

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.memory.state_dicts import versioned, versions_of
from lightning_memfit.strategies.integrity import within
from lightning_memfit.strategies.safe_loading import load, load_index
from lightning_memfit.strategies.saved_run import (
    VERSIONS,
    SavedOptimizer,
    SavedRun,
    check_left_out,
    check_names,
    check_trained,
    group_names,
    in_order_of_groups,
    named_versions,
    parameter_names,
    pieces_of,
    plain_name,
    whole,
)

META = "meta.pt"
"""The file with everything but weights and optimizer states; it is written last."""

Place = tuple[Any, ...]
"""Where a value is in a checkpoint: `("optimizer_0", "state", "net.weight", "exp_avg")`."""

_WEIGHTS = "state_dict"


class Source(Protocol):
    """A checkpoint that values are read from into divided tensors."""

    def weights(self) -> set[str]:
        """Names of parameters and buffers."""

    def trained_names(self) -> set[str]:
        """Names of the parameters that optimizers stepped."""

    def optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[SavedOptimizer]:
        """Groups and states of the optimizers; values of states are `...` where `read` gives them."""

    def read(self, into: Mapping[Place, Any]) -> dict[Place, Any]:
        """Read values into tensors, of which this rank may have a part; others are returned in their places."""


# --- folders --------------------------------------------------------------------------------------------------------


class _Reader(FileSystemReader):
    """Reads a folder whose index was loaded with `load_index` instead of `pickle`."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if getattr(self._index, "storage_meta", None) is None:
            self._index.storage_meta = StorageMeta()
        assert self._index.storage_meta is not None
        self._index.storage_meta.load_id = self.load_id
        return self._index


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors with `load` instead of `pickle`, into a flat dict."""

    def __init__(self, path: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.path = path

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = load(value, name=self.path)


class _Folder:
    """What FSDP2 has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata: Metadata = load_index(folder / ".metadata")
        for stored in (self._metadata.storage_data or {}).values():
            within(folder, stored.relative_path)
        self._keys: dict[Place, str] = {tuple(path): key for key, path in (self._metadata.planner_data or {}).items()}

    def below(self, *begin: Any) -> list[Place]:
        """Places of what lies below one."""
        return [path for path in self._keys if path[: len(begin)] == begin]

    def empty(self, path: Place) -> Tensor | None:
        """Memory for a tensor as it was saved, whole; None for other values."""
        entry = self._metadata.state_dict_metadata[self._keys[path]]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")

    def read_whole(self, *begin: Any) -> dict[Place, Any]:
        """Everything below a place, in this process's memory."""
        return self.read({path: self.empty(path) for path in self.below(*begin)})

    def weights(self) -> set[str]:
        return {path[1] for path in self.below(_WEIGHTS)}

    def names(self) -> list[str]:
        """Keys of the optimizers."""
        count = len({path[0] for path in self._keys if str(path[0]).startswith("optimizer_")})
        return [f"optimizer_{number}" for number in range(count)]

    def trained_names(self) -> set[str]:
        return {name for key in self.names() for group in self.groups(key) for name in group["params"]}

    def optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[SavedOptimizer]:
        found = []
        for name in self.names():
            states: dict[str, dict[str, Any]] = {}
            for path in self.below(name, "state"):
                if len(path) > 3:
                    states.setdefault(path[2], {})[path[3]] = ...
            found.append(SavedOptimizer(self.groups(name), states, self.folder))
        return found

    def groups(self, optimizer: str) -> list[dict[str, Any]]:
        """Groups of an optimizer, with their parameters' names."""
        made: dict[str, Any] = {}
        for path, value in self.read_whole(optimizer, "param_groups").items():
            _put(made, path[1:], value)
        return list(made.get("param_groups", []))

    def read(self, into: Mapping[Place, Any]) -> dict[Place, Any]:
        nested = {path: self.below(*path) for path in into if path not in self._keys}  # of `get_extra_state`
        if nested:
            leaves = self.read({leaf: self.empty(leaf) for below in nested.values() for leaf in below})
            made: dict[Any, Any] = {}
            for path, below in nested.items():
                for leaf in below:
                    _put(made, (path, *leaf[len(path) :]), leaves[leaf])
            return made | self.read({path: value for path, value in into.items() if path not in nested})
        flat = {self._keys[path]: value for path, value in into.items()}
        try:
            if flat:
                reader, planner = _Reader(self.folder, self._metadata), _Planner(self.folder)
                state_dict_loader.load(flat, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # which says no more than the ranks' numbers
            raise next(iter(error.failures.values()))[0] from error
        return {path: self._as_it_was(path, flat[self._keys[path]]) for path in into}

    def _as_it_was(self, path: Place, value: Any) -> Any:
        """What `kept_whole` has made bytes of; folders of earlier versions have it leaf by leaf."""
        is_kept = isinstance(value, bytes) and str(path[-1]).endswith(_EXTRA_STATE_KEY_SUFFIX)
        return load(io.BytesIO(value), name=self.folder) if is_kept else value


def kept_whole(name: str, value: Any) -> Any:
    """An entry of a state dict as it is to be written: what `get_extra_state` gave, as bytes.

    torch would write the leaves of its dicts and lists one by one, with keys as text and without those that are empty.
    """
    if not name.endswith(_EXTRA_STATE_KEY_SUFFIX) or isinstance(value, Tensor):
        return value
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _put(at: Any, path: Place, value: Any) -> None:
    """Put a value at its place in nested dicts and lists."""
    for here, after in pairwise(path):
        if isinstance(at, list):
            at.extend(None for _ in range(here + 1 - len(at)))
            known = at[here]
        else:
            known = at.get(here)
        if known is None:
            known = at[here] = [] if isinstance(after, int) else {}
        at = known
    if isinstance(at, list):
        at.extend(None for _ in range(path[-1] + 1 - len(at)))
    at[path[-1]] = value


def read_shards(folder: Path, weights_only: bool | None = None) -> SavedRun:
    """Read a whole folder into this process's memory."""
    source = _Folder(folder)
    optimizers = []
    for name in source.names():
        made: dict[str, Any] = {"state": {}}
        for path, value in source.read_whole(name, "state").items():
            if len(path) > 3:
                _put(made, path[1:], value)
        optimizers.append(made | {"param_groups": source.groups(name)})
    weights: dict[str, Any] = {}
    for path, value in source.read_whole(_WEIGHTS).items():
        _put(weights, path[1:], value)
    extras: dict[str, Any] = load(folder / META, weights_only)
    versions = extras.pop(VERSIONS, None)
    has_optimizers = bool(optimizers) or "lr_schedulers" in extras  # which Lightning leaves out with the states
    return SavedRun(
        folder,
        {name: pieces_of(value) for name, value in weights.items()},
        extras,
        optimizers if has_optimizers else None,
        versions=versions,
    )


# --- other checkpoints ----------------------------------------------------------------------------------------------


class _Memory(StorageReader):
    """Whole tensors, as torch reads them from a distributed checkpoint: each rank takes its part."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    tensor.size(),
                    [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())],
                )
                for name, tensor in self.tensors.items()
            }
        )

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            part = self.tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @override
    def reset(self, checkpoint_id: Any = None) -> None: ...

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Whole:
    """A checkpoint of another strategy, or of a run on one device."""

    def __init__(self, saved: SavedRun) -> None:
        self.saved = saved
        self._optimizers: list[SavedOptimizer] = []

    def weights(self) -> set[str]:
        return set(self.saved.weights)

    def trained_names(self) -> set[str]:
        return self.saved.trained_names()

    def optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[SavedOptimizer]:
        self._optimizers = self.saved.named_optimizers(group_names(optimizers, parameter_names(module, optimizers)))
        return self._optimizers

    def read(self, into: Mapping[Place, Any]) -> dict[Place, Any]:
        read: dict[Place, Any] = {}
        for path, value in into.items():  # one after the other: a tensor may have to be put together first
            saved = whole(self._at(path))
            if isinstance(value, Tensor) and isinstance(saved, Tensor) and value.dim() and value.shape == saved.shape:
                flat = {"one": value}
                state_dict_loader.load(
                    flat, storage_reader=_Memory({"one": saved}), planner=_Planner(self.saved.path), no_dist=True
                )
                read[path] = flat["one"]
            else:
                read[path] = saved
        return read

    def _at(self, path: Place) -> Any:
        if path[0] == _WEIGHTS:
            return self.saved.weights[path[1]]
        return self._optimizers[path[0]].states[path[2]][path[3]]


# --- loading --------------------------------------------------------------------------------------------------------


def load_divided(
    saved: SavedRun | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None = None,
    schedulers: Sequence[Any] = (),
) -> dict[str, Any]:
    """Load a checkpoint into divided parameters and their optimizers; each rank reads its own part.

    Args:
        saved: A folder that FSDP2 wrote on any number of ranks, or what else was read.
        module: With parameters that are DTensors.
        optimizers: Those to go on with; none to load weights alone.
        strict: Refuse missing and unexpected weights.
        weights_only: See `load`, for the file of a folder that holds what Lightning saved.
        schedulers: Schedules of the optimizers, whose states are put into the order of their groups.

    Returns:
        What Lightning, callbacks and the module saved besides.

    Raises:
        ValueError: If the optimizers' groups can't be those of the run that wrote the checkpoint.
    """
    weights = get_model_state_dict(module)  # by names without those of torch.compile, as folders have them
    source: Source = _Folder(saved) if isinstance(saved, Path) else _Whole(saved.named_as(weights))
    path, known = saved if isinstance(saved, Path) else saved.path, source.weights()
    if strict:
        check_names(path, known, weights, module)
    found = _optimizers_of(source, path, module, optimizers)
    read = source.read({(_WEIGHTS, name): value for name, value in weights.items() if name in known})
    extras: dict[str, Any] = saved.extras if isinstance(saved, SavedRun) else load(saved / META, weights_only)
    own = module.state_dict()
    versions = saved.versions if isinstance(saved, SavedRun) else extras.pop(VERSIONS, None)
    called = {plain_name(name): name for name in own}
    entries = {called[name]: value for (_, name), value in read.items()}
    module.load_state_dict(versioned(entries, named_versions(versions, versions_of(own))), strict=False)
    if optimizers:
        for number, (optimizer, one) in enumerate(zip(optimizers, found, strict=True)):
            key = f"optimizer_{number}" if isinstance(saved, Path) else number
            live: Any = get_optimizer_state_dict(module, optimizer)["state"]
            for name in one.states.keys() & live.keys():
                if one.states[name].keys() - live[name].keys():
                    raise ValueError(
                        f"`ckpt_path={str(path)!r}` has states {sorted(one.states[name])} of {name!r}, and this run's "
                        f"{type(optimizer).__name__} keeps {sorted(live[name])}. Make the optimizer as the saved run "
                        "did, or load the weights alone."
                    )
            one.states = {name: state for name, state in one.states.items() if name in live}
            states = source.read(
                {(key, "state", name, what): live[name][what] for name, state in one.states.items() for what in state}
            )
            for (_, _, name, what), value in states.items():
                one.states[name] = one.states[name] | {what: value}
            _set_states(module, optimizer, one)
        if schedules := extras.get("lr_schedulers"):
            groups = group_names(optimizers, parameter_names(module, optimizers))
            extras = extras | {"lr_schedulers": in_order_of_groups(schedules, schedulers, optimizers, found, groups)}
    return extras


def _optimizers_of(
    source: Source, path: Path, module: nn.Module, optimizers: Sequence[Optimizer]
) -> list[SavedOptimizer]:
    """Groups and states for the optimizers of a run, if they can be those of the run that wrote them."""
    if not optimizers:
        return []
    groups = group_names(optimizers, parameter_names(module, optimizers))
    if trained := source.trained_names():
        check_trained(path, trained, groups, module)
    found = source.optimizers(module, optimizers)
    if len(found) != len(optimizers):
        raise ValueError(
            f"`ckpt_path={str(path)!r}` has {len(found)} optimizers, this run {len(optimizers)}. Make them as the "
            "saved run did, or load the weights alone."
        )
    check_left_out(path, found, groups, module)
    for one, optimizer in zip(found, optimizers, strict=True):
        one.refuse_beside(optimizer)
    return found


def _set_states(module: nn.Module, optimizer: Optimizer, saved: SavedOptimizer) -> None:
    """Give an optimizer of divided parameters saved states and the options of its groups."""
    state_dict = saved.state_dict(optimizer.param_groups, parameter_names(module, [optimizer]), numbered=False)
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state_dict, options=StateDictOptions(strict=False))
    for group, one in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        if not group["params"]:  # torch 2.13 takes all options away from these
            group.update({key: value for key, value in one.items() if key != "params"})
