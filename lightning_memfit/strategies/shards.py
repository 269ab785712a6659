"""Folders that FSDP2 writes: a distributed checkpoint of torch, and one file with what Lightning saves besides.

torch itself reads them by unpickling whatever they hold. Here only tensors and plain values are read, and optimizer states
go to parameters by name, whatever groups they were in.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.strategies.safe_loading import load, load_index
from lightning_memfit.strategies.saved_run import (
    Pieces,
    SavedOptimizer,
    SavedRun,
    check_names,
    group_names,
    parameter_names,
)

META = "meta.pt"
"""The file with everything but weights and optimizer states; it is written last."""

_WEIGHTS = "state_dict"


class _Reader(dcp.FileSystemReader):
    """Reads the index with `load_index` instead of `pickle`."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: Metadata = load_index(Path(self.path) / ".metadata")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors with `load` instead of `pickle`, into a flat dict."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = load(value)


class _Index:
    """What a folder holds, by paths: `("optimizer_0", "state", "net.weight", "exp_avg")`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = _Reader(folder).read_metadata()
        self._keys: dict[tuple[Any, ...], str] = {
            tuple(path): key for key, path in (self._metadata.planner_data or {}).items()
        }

    def below(self, *begin: Any) -> list[tuple[Any, ...]]:
        """Paths of what lies below one."""
        return [path for path in self._keys if path[: len(begin)] == begin]

    def empty(self, path: tuple[Any, ...]) -> Tensor | None:
        """Memory for a tensor as it was saved, whole; None for other values."""
        entry = self._metadata.state_dict_metadata[self._keys[path]]
        return (
            torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        )

    def read(self, into: Mapping[tuple[Any, ...], Any], together: bool) -> dict[tuple[Any, ...], Any]:
        """Read entries into tensors, of which this rank may have a part; others are returned in their places.

        Args:
            into: Tensors to read to, and None for other values.
            together: All ranks read the same entries; otherwise this one reads on its own.
        """
        flat = {self._keys[path]: value for path, value in into.items()}
        if flat:
            dcp.load(flat, storage_reader=_Reader(self.folder), planner=_Planner(), no_dist=not together)
        return {path: flat[self._keys[path]] for path in into}

    def groups(self, optimizer: str) -> list[dict[str, Any]]:
        """Groups of an optimizer, with their parameters' names."""
        paths = self.below(optimizer, "param_groups")
        read = self.read({path: self.empty(path) for path in paths}, together=False)
        groups: list[dict[str, Any]] = [
            {} for _ in range(1 + max((path[2] for path in paths if len(path) > 2), default=-1))
        ]
        for path, value in read.items():
            if len(path) == 2:
                return list(value)
            at: Any = groups[path[2]]
            _put(at, path[3:], value)
        return groups

    def num_optimizers(self) -> int:
        """How many optimizers were saved."""
        return len({path[0] for path in self._keys if str(path[0]).startswith("optimizer_")})


def _put(at: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value at its place in nested dicts and lists."""
    for here, after in zip(path[:-1], path[1:], strict=True):
        missing: Any = [] if isinstance(after, int) else {}
        if isinstance(at, list):
            at.extend(None for _ in range(here + 1 - len(at)))
            at[here] = missing if at[here] is None else at[here]
            at = at[here]
        else:
            at = at.setdefault(here, missing)
    if isinstance(at, list):
        at.extend(None for _ in range(path[-1] + 1 - len(at)))
    at[path[-1]] = value


def read_shards(folder: Path, weights_only: bool | None = None) -> SavedRun:
    """Read a whole folder into this process's memory."""
    index = _Index(folder)
    paths = [*index.below(_WEIGHTS)]
    names = [f"optimizer_{number}" for number in range(index.num_optimizers())]
    paths += [path for name in names for path in index.below(name, "state")]
    read = index.read({path: index.empty(path) for path in paths}, together=False)
    optimizers = []
    for name in names:
        state: dict[str, Any] = {}
        for path in index.below(name, "state"):
            if len(path) > 3:
                _put(state, path[2:], read[path])
        optimizers.append({"state": state, "param_groups": index.groups(name)})
    weights = {path[1]: Pieces.of(read[path]) for path in index.below(_WEIGHTS) if isinstance(read[path], Tensor)}
    return SavedRun(folder, weights, load(folder / META, weights_only), optimizers or None)


def load_shards(
    folder: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None = None
) -> dict[str, Any]:
    """Load a folder into sharded parameters and their optimizers; each rank reads its own part, on any number of ranks.

    Args:
        folder: The checkpoint.
        module: With parameters that are DTensors.
        optimizers: Those to go on with; none to load weights alone.
        strict: Refuse missing and unexpected weights.
        weights_only: See `load`, for the file of what Lightning saved.

    Returns:
        What Lightning, callbacks and the module saved besides.

    Raises:
        ValueError: If the optimizers' groups can't be those of the run that wrote the folder.
    """
    index = _Index(folder)
    weights = get_model_state_dict(module)
    saved = {path[1] for path in index.below(_WEIGHTS)}
    index.read({(_WEIGHTS, name): weights[name] for name in weights.keys() & saved}, together=True)
    if strict:
        check_names(folder, saved, weights)
    module.load_state_dict({name: weights[name] for name in weights if name in saved}, strict=False)
    if optimizers and index.num_optimizers() != len(optimizers):
        raise ValueError(
            f"`ckpt_path={str(folder)!r}` has {index.num_optimizers()} optimizers, this run {len(optimizers)}. Make them "
            "as the saved run did, or load the weights alone."
        )
    for number, optimizer in enumerate(optimizers):
        name = f"optimizer_{number}"
        own = get_optimizer_state_dict(module, optimizer)
        into = {
            (name, "state", parameter, key): value
            for parameter, state in own["state"].items()
            for key, value in state.items()  # type: ignore[union-attr]
        }
        present = set(index.below(name, "state"))
        read = index.read({path: value for path, value in into.items() if path in present}, together=True)
        states: dict[str, dict[str, Any]] = {}
        for (_, _, parameter, key), value in read.items():
            states.setdefault(parameter, {})[key] = value
        _set_states(
            module, optimizer, SavedOptimizer(index.groups(name), states, folder), StateDictOptions(strict=False)
        )
    extras: dict[str, Any] = load(folder / META, weights_only)
    return extras


def load_whole(saved: SavedRun, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool) -> dict[str, Any]:
    """Load whole weights and states into sharded parameters and their optimizers; rank 0's are distributed.

    Args:
        saved: The checkpoint.
        module: With parameters that are DTensors.
        optimizers: Those to go on with; none to load weights alone.
        strict: Refuse missing and unexpected weights.

    Returns:
        What Lightning, callbacks and the module saved besides.

    Raises:
        ValueError: If the optimizers' groups can't be those of the run that wrote the checkpoint.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    if strict:
        check_names(saved.path, saved.weights, get_model_state_dict(module))
    set_model_state_dict(module, saved.state_dict(), options=options)
    if optimizers:
        groups = group_names(optimizers, parameter_names(module))
        for optimizer, states in zip(optimizers, saved.named_optimizers(groups), strict=True):
            _set_states(module, optimizer, states, options)
    return saved.extras


def _set_states(module: nn.Module, optimizer: Optimizer, saved: SavedOptimizer, options: StateDictOptions) -> None:
    """Give an optimizer of sharded parameters saved states and the options of its groups."""
    names = parameter_names(module)
    state_dict = saved.state_dict(optimizer.param_groups, names, numbered=False)
    if any(_is_divided(value) for state in state_dict["state"].values() for value in state.values()):
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state_dict, options=options)
        return
    # torch 2.13 fails ("Expected device to be set") for optimizers that keep no tensors of their parameters' shape.
    for group, options_of_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({key: value for key, value in options_of_group.items() if key != "params"})
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for name, state in state_dict["state"].items():
        optimizer.state[parameters[name]] = dict(state)


def _is_divided(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.dim())
