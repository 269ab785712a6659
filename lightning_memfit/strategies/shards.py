"""Checkpoints of parameters that are divided among ranks: folders of `torch.distributed.checkpoint`.

A folder is a distributed checkpoint of torch and one file with what Lightning saves besides, as Lightning's
`ModelParallelStrategy` writes them. torch reshards it for any number of ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.strategies.integrity import FSDP2_MARK
from lightning_memfit.strategies.safe_loading import load_index, without_code
from lightning_memfit.strategies.saved_names import check_names, check_stepped, parameter_names, plain_name
from lightning_memfit.strategies.upstream.torch import divided_as, plain

WEIGHTS, CURRENT = "state_dict", "current_model_state"
"""Keys of Lightning's checkpoints: of averaged weights where `WeightAveraging` runs, with those in training beside."""


class _Reader(FileSystemReader):
    """Reads a folder whose index is loaded by `load_index` instead of `pickle`."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index: Metadata = load_index(Path(self.path) / ".metadata")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Folder:
    """A distributed checkpoint, by the paths of its values: `("optimizer_0", "state", "net.weight", "exp_avg")`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self.keys: dict[tuple[Any, ...], str] = {
            tuple(path): key for key, path in (self._metadata.planner_data or {}).items()
        }

    def below(self, *begin: Any) -> list[tuple[Any, ...]]:
        """Paths that begin so."""
        return [path for path in self.keys if path[: len(begin)] == begin]

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read what there is of nested values, in their places; each rank reads its part of tensors."""
        try:
            planner = DefaultLoadPlanner(allow_partial_load=True)
            state_dict_loader.load(values, storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # which says no more than the ranks' numbers
            raise next(iter(error.failures.values()))[0] from error
        return values

    def read_whole(self, *begin: Any) -> dict[Any, Any]:
        """Everything whose path begins so, nested, with whole tensors in this process's memory."""
        paths = self.below(*begin)
        flat = self.read({self.keys[path]: self._empty(path) for path in paths})
        made: dict[Any, Any] = {}
        for path in paths:
            at: dict[Any, Any] = made
            for name in path[len(begin) : -1]:
                at = at.setdefault(name, {})
            at[path[-1]] = flat[self.keys[path]]
        return made

    def _empty(self, path: tuple[Any, ...]) -> Any:
        """Memory for a whole tensor; None for other values."""
        entry = self._metadata.state_dict_metadata[self.keys[path]]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")


def whole(folder: Path) -> dict[str, Any]:
    """Weights of a folder, put together in memory, and everything else but states of optimizers."""
    extras: dict[str, Any] = torch.load(folder / FSDP2_MARK, map_location="cpu")  # nosec B614  # `without_code`
    return extras | {WEIGHTS: _Folder(folder).read_whole(WEIGHTS)}


def load_folder(
    folder: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a folder that FSDP2 wrote, on any number of ranks, into divided parameters and their optimizers.

    Returns:
        What Lightning, callbacks and the module saved besides.

    Raises:
        ValueError: If the optimizers have other weights than those of the run that wrote the checkpoint.
    """
    with without_code(folder, weights_only):
        source = _Folder(folder)
        weights = get_model_state_dict(module)  # by names without those of torch.compile, as folders have them
        check_names(folder, {path[1] for path in source.below(WEIGHTS)}, weights, strict)
        states = [_states(source, f"optimizer_{number}", module, one) for number, one in enumerate(optimizers)]
        known = {path[0] for path in source.keys if path[0] not in (WEIGHTS, CURRENT)}
        if optimizers:
            saved = [_names_in(states[number]) for number in range(min(len(known), len(states)))]
            saved += [set()] * (len(known) - len(saved))
            names = parameter_names(module)
            check_stepped(
                folder, saved, [{names[id(p)] for g in one.param_groups for p in g["params"]} for one in optimizers]
            )
        read = source.read({WEIGHTS: {name: plain(one) for name, one in weights.items()}})[WEIGHTS]
        current: dict[str, Any] = {}
        if optimizers and source.below(CURRENT):
            own = module.state_dict()
            current = source.read({CURRENT: {name: one.clone() for name, one in own.items()}})[CURRENT]
        extras: dict[str, Any] = torch.load(
            folder / FSDP2_MARK, map_location="cpu", weights_only=weights_only is not False
        )  # nosec B614
    called = {plain_name(name): name for name in module.state_dict()}
    module.load_state_dict({called[name]: divided_as(weights[name], one) for name, one in read.items()}, strict=False)
    for optimizer, state_dict in zip(optimizers, states, strict=True):
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state_dict, options=options)
        for group, one in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
            if not group["params"]:  # torch 2.13 takes all options away from these
                group.update({key: value for key, value in one.items() if key != "params"})
    return extras | ({CURRENT: current} if current else {})


def _states(source: _Folder, key: str, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """States and groups of an optimizer as they were saved: of those that torch makes for it, the ones saved."""
    live: Any = get_optimizer_state_dict(module, optimizer)["state"]
    states = {
        name: {what: plain(value) for what, value in state.items() if (key, "state", name, what) in source.keys}
        for name, state in live.items()
        if source.below(key, "state", name)
    }
    groups, read = source.read_whole(key, "param_groups"), source.read({key: {"state": states}})[key]["state"]
    return {
        "state": {
            name: {what: divided_as(live[name][what], value) for what, value in state.items()}
            for name, state in read.items()
        },
        "param_groups": [groups[n] for n in sorted(groups)],
    }


def _names_in(state_dict: Mapping[str, Any]) -> set[str]:
    return {name for group in state_dict["param_groups"] for name in group["params"]}


def load_weights(path: str | Path, checkpoint: dict[str, Any], module: nn.Module, strict: bool) -> dict[str, Any]:
    """Load another strategy's weights into divided parameters, and give everything but these and states."""
    weights = {plain_name(name): value for name, value in checkpoint[WEIGHTS].items()}
    live = {plain_name(name): (name, one) for name, one in module.state_dict().items()}
    check_names(path, weights, live, strict)
    known = {live[name][0]: divided_as(live[name][1], one) for name, one in weights.items() if name in live}
    module.load_state_dict(known, strict=False)
    return {key: value for key, value in checkpoint.items() if key not in (WEIGHTS, "optimizer_states")}
