"""What a checkpoint holds, by the names of parameters, whatever strategy and however many ranks wrote it.

Every kind of checkpoint is read into a `SavedRun`, and every strategy goes on from one. Tensors stay on disk until a
part of them is asked for, so that a rank reads no more than its share.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_memfit.memory.state_dicts import Versions, versioned, versions_in, versions_of
from lightning_memfit.optim.states import FLOAT32_STEP, RECORD

PARAMETERS = "memfit_parameters"
"""Key of a checkpoint: names of the parameters in each group of each optimizer, which states are numbered by."""

VERSIONS = "memfit_versions"
"""Key of a checkpoint in a folder: versions of its modules' formats, which a state dict in one file keeps itself."""

EXTRA_STATE = "_extra_state"
"""Last part of the name under which a state dict has what `get_extra_state` gave."""

_DIVIDED = ("state", "param_groups")
"""Keys of an optimizer's state dict that are told by names of parameters."""

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of a group that say how it is stepped and not where to: these stay as the run has them."""


@dataclass(frozen=True)
class Pieces:
    """A tensor in parts that lie in several files.

    Attributes:
        shape: Of the whole tensor.
        parts: One-dimensional parts with the places of their first elements, in order and without gaps.
    """

    shape: torch.Size
    parts: Sequence[tuple[int, Tensor]]

    @classmethod
    def of(cls, whole: Tensor) -> "Pieces":
        """A tensor that is in one part."""
        return cls(whole.shape, [(0, whole.detach().reshape(-1))])

    def between(self, start: int, stop: int) -> Tensor:
        """The elements from `start` to `stop` of the flattened tensor; fewer if it ends before."""
        found = [
            part[max(start - first, 0) : stop - first]
            for first, part in self.parts
            if first < stop and first + part.numel() > start
        ]
        return found[0] if len(found) == 1 else torch.cat(found) if found else self.parts[0][1][:0]

    def whole(self) -> Tensor:
        """The tensor, in memory of its own."""
        found = self.between(0, self.shape.numel())
        return (found.clone() if len(self.parts) == 1 else found).view(self.shape)


@dataclass(frozen=True)
class Undivided:
    """A state that several parameters share, and that can't be divided among them, such as scales of 8-bit blocks."""

    name: str
    path: str | Path

    def refuse(self) -> NoReturn:
        """Say so.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"`ckpt_path={str(self.path)!r}` has optimizer states {self.name!r} of several parameters in one. They "
            "can't be divided: resume with the strategy and the number of ranks that wrote it, or load the weights "
            "alone (`memfit export`)."
        )


class _Withheld(Sequence[Any]):
    """States of optimizers that can't be loaded: who asks for one is told so, and who loads weights asks for none."""

    def __init__(self, reason: Undivided, count: int) -> None:
        self._reason, self._count = reason, count

    @override
    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, place: Any) -> NoReturn:
        self._reason.refuse()


def pieces_of(value: Any) -> Any:
    """A dense tensor as `Pieces`; sparse tensors, other kinds and what is no tensor (`get_extra_state`) as they are."""
    is_dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return Pieces.of(value) if is_dense else value


def whole(value: Any) -> Any:
    """A tensor in memory of its own, put together of its pieces; so are tensors in anything else.

    Raises:
        ValueError: If the value is `Undivided`.
    """
    if isinstance(value, Undivided):
        value.refuse()
    return value.whole() if isinstance(value, Pieces) else owned(value)


def owned(value: Any) -> Any:
    """The same with tensors in memory of their own: those that lie in a file must not outlive it.

    What is no plain container is copied whole, by the rules of its class: a `deque` keeps its length.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, owned(entry)) for key, entry in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(owned, value))
    return deepcopy(value)


@dataclass
class SavedOptimizer:
    """States and groups of one optimizer by names.

    Attributes:
        groups: Options of each group; "params" are names.
        states: States of each parameter by name: `Pieces` of its shape, or what else the optimizer keeps.
        path: The checkpoint, for messages.
        beside: What the optimizer's state dict has beside groups and states.
    """

    groups: list[dict[str, Any]]
    states: dict[str, dict[str, Any]]
    path: str | Path
    beside: dict[str, Any] = field(default_factory=dict)

    def options(self, names: Iterable[str], live: Mapping[str, Any]) -> dict[str, Any]:
        """Options for a group of the run that goes on.

        Args:
            names: Its parameters.
            live: The group as the run made it.

        Raises:
            ValueError: If a parameter was in no group, or the parameters were in groups with different options.
        """
        held = {name: group for group in self.groups for name in group["params"]}
        found: dict[str, Any] | None = None
        for name in names:
            if name not in held:
                raise ValueError(
                    f"`ckpt_path={str(self.path)!r}` has no optimizer group with {name!r}. Make the optimizer as the "
                    "saved run did, or load the weights alone."
                )
            options = {key: value for key, value in held[name].items() if key not in ("params", "param_names")}
            options |= {key: live[key] for key in _IMPLEMENTATION if key in live}
            if found is not None and not _same(options, found):
                different = sorted(key for key in options if not _same(options[key], found.get(key)))
                raise ValueError(
                    f"`ckpt_path={str(self.path)!r}` has {name!r} in a group whose {', '.join(different)} differ from "
                    "those of the others in this run's group. Make the optimizer's groups as the saved run did, or "
                    "load the weights alone."
                )
            found = options
        return found or {key: value for key, value in live.items() if key != "params"}

    def state_dict(
        self, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str], numbered: bool
    ) -> dict[str, Any]:
        """A state dict for an optimizer of whole parameters, put together in memory.

        Args:
            groups: `param_groups` of that optimizer.
            names: Names of the module's parameters by `id`.
            numbered: Number parameters through the groups, as `Optimizer.load_state_dict` does, instead of naming them.
        """
        known = {name for group in self.groups for name in group["params"]}
        state, made, count = {}, [], 0
        for number, group in enumerate(groups):
            keys: list[Any] = []
            own = [(names[id(parameter)], parameter) for parameter in group["params"]]
            for name, parameter in own:
                key = count if numbered else name
                if name in self.states:
                    state[key] = {what: whole(value) for what, value in self.states[name].items()}
                    _check_shapes(state[key], name, parameter, self.path)
                keys.append(key)
                count += 1
            trained = [name for name, parameter in own if parameter.requires_grad or name in known]
            of_place = self._empty_at(number) if not own and len(groups) == len(self.groups) else None
            made.append(self.options(trained, of_place or group) | {"params": keys})
        return {key: whole(value) for key, value in self.beside.items()} | {"state": state, "param_groups": made}

    def _empty_at(self, number: int) -> dict[str, Any] | None:
        """The group at a place, if it has no parameters by which it could be known."""
        return None if self.groups[number]["params"] else self.groups[number]

    def places(self, groups: Sequence[Sequence[str]]) -> list[int | None]:
        """The saved group that each group of a run goes on from; None for one that is new.

        Args:
            groups: Names in each group of this run's optimizer.
        """
        held = {name: number for number, group in enumerate(self.groups) for name in group["params"]}
        is_alike = len(groups) == len(self.groups)
        return [
            next((held[name] for name in names if name in held), number if is_alike and not names else None)
            for number, names in enumerate(groups)
        ]

    def refuse_beside(self, optimizer: Any) -> None:
        """Refuse to go on without what an optimizer of divided parameters keeps beside groups and states.

        Raises:
            ValueError: Naming it; what our own techniques write there only tells how the states were made.
        """
        lost = sorted({*self.beside, *_kept_beside(optimizer)} - {*_DIVIDED, RECORD, FLOAT32_STEP})
        if lost:
            raise ValueError(
                f"`ckpt_path={str(self.path)!r}`: {type(optimizer).__name__} keeps {listed(lost)} beside its groups "
                "and states, which no strategy that divides parameters saves or loads. Resume on one device or under "
                "`strategy=memfit_ddp` from a checkpoint that was written so, or load the weights alone."
            )


def _kept_beside(optimizer: Any) -> set[str]:
    """Keys of an optimizer's state dict, read without states: DeepSpeed leaves some of parameters in no group."""
    states, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        return set(optimizer.state_dict())
    finally:
        optimizer.state = states


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


_BY_GROUP = ("_last_lr", "base_lrs", "base_momentums", "lr_lambdas", "max_lrs", "max_momentums", "min_lrs")
"""What torch's schedules keep in lists with an entry for each group."""


def in_order_of_groups(
    schedules: Sequence[dict[str, Any]],
    schedulers: Sequence[Any],
    optimizers: Sequence[Any],
    saved: Sequence[SavedOptimizer],
    groups: Sequence[Sequence[Sequence[str]]],
) -> list[dict[str, Any]]:
    """States of schedules, which tell groups by their places, for a run with groups in another order.

    Args:
        schedules: As the checkpoint has them.
        schedulers: Those of the run, in the same order.
        optimizers: Those of the run.
        saved: Those of the checkpoint.
        groups: Names in each group of each optimizer of this run, from `group_names`.
    """
    made = []
    for state, scheduler in zip(schedules, schedulers, strict=False):
        number = next((n for n, one in enumerate(optimizers) if one is scheduler.optimizer), 0)
        places, count = saved[number].places(groups[number]), len(saved[number].groups)
        made.append(state if places == [*range(count)] else _in_order(state, scheduler, places, count))
    return [*made, *schedules[len(made) :]]


def _in_order(state: dict[str, Any], scheduler: Any, places: Sequence[int | None], count: int) -> dict[str, Any]:
    own, made = scheduler.state_dict(), dict(state)
    for key, values in state.items():
        if key in _BY_GROUP and isinstance(values, (list, tuple)) and len(values) == count:
            made[key] = [own[key][new] if place is None else values[place] for new, place in enumerate(places)]
        elif key == "_schedulers":  # those that one is composed of
            pairs = zip(values, scheduler._schedulers, strict=True)
            made[key] = [_in_order(one, its, places, count) for one, its in pairs]
    return made


_ELEMENTWISE = {
    "acc_delta",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
}
"""States of torch's optimizers that have their parameter's shape."""


def _check_shapes(state: Mapping[str, Any], name: str, parameter: Tensor, path: str | Path) -> None:
    """Refuse states that are another parameter's."""
    for key, value in state.items():
        if isinstance(value, Tensor) and key in _ELEMENTWISE and value.dim() and value.shape != parameter.shape:
            raise ValueError(
                f"`ckpt_path={str(path)!r}` has an optimizer state of shape {tuple(value.shape)} where this run's "
                f"{name!r} has {tuple(parameter.shape)}: the optimizer's groups are in another order. Make the "
                "optimizer as the saved run did, or load the weights alone."
            )


def numbered_optimizer(
    saved: Mapping[str, Any], names: Sequence[Sequence[str]] | None, path: str | Path
) -> SavedOptimizer:
    """An `Optimizer.state_dict()` by names.

    Args:
        saved: One of a run on one device or under DDP, which numbers parameters through its groups; one with names
            stays as it is.
        names: Names of the parameters in each group; None if the dict has names.
        path: The checkpoint, for messages.

    Raises:
        ValueError: If the groups have other numbers of parameters.
    """
    keys = [list(group["params"]) for group in saved["param_groups"]]
    if all(isinstance(key, str) for group in keys for key in group):
        called = {key: key for group in keys for key in group}
    else:
        assert names is not None
        if [len(group) for group in keys] != [len(group) for group in names]:
            raise ValueError(
                f"`ckpt_path={str(path)!r}` has optimizer groups of {', '.join(str(len(group)) for group in keys)} "
                f"parameters, this run of {', '.join(str(len(group)) for group in names)}. Make the optimizer as the "
                "saved run did, or load the weights alone."
            )
        called = {
            key: name
            for group, of_group in zip(keys, names, strict=True)
            for key, name in zip(group, of_group, strict=True)
        }
    return SavedOptimizer(
        [
            {**group, "params": [called[key] for key in of_group]}
            for group, of_group in zip(saved["param_groups"], keys, strict=True)
        ],
        {called[key]: dict(state) for key, state in saved["state"].items()},
        path,
        {key: value for key, value in saved.items() if key not in _DIVIDED},
    )


@dataclass
class SavedRun:
    """Everything that a checkpoint holds.

    Attributes:
        path: The checkpoint.
        weights: Parameters and buffers by their names in the module's state dict, as `pieces_of` gives them; the same
            parameter may have several.
        extras: What Lightning, callbacks, the module and its data saved besides.
        optimizers: State dicts of the optimizers, numbered or named; None if the checkpoint holds weights alone.
        layout: What else the reader knows, for strategies of its own kind.
        versions: Those of the modules' formats; None if nothing is known of them, as in folders of earlier versions.
    """

    path: Path
    weights: dict[str, Any]
    extras: dict[str, Any]
    optimizers: list[dict[str, Any]] | None
    layout: Any = field(default=None, repr=False)
    versions: Versions | None = field(default=None, repr=False)

    def named_as(self, names: Iterable[str]) -> "SavedRun":
        """The same run with its weights under a module's names.

        They differ where one of both is compiled: `torch.compile` puts a layer named `_orig_mod` around a network.
        Where nothing is known of versions, they are the module's.

        Args:
            names: The module's state dict, or its keys.
        """
        called = {plain_name(name): name for name in names}
        weights = {called.get(plain_name(name), name): value for name, value in self.weights.items()}
        return replace(self, weights=weights, versions=named_versions(self.versions, versions_of(names)))

    def state_dict(self) -> dict[str, Any]:
        """Whole weights, in host memory."""
        return versioned({name: whole(value) for name, value in self.weights.items()}, self.versions)

    def checkpoint(self) -> dict[str, Any]:
        """What a run on one device would have saved, with states by names where they are known.

        States that can't be divided are refused when they are asked for: weights load without them.
        """
        saved = self.extras | {"state_dict": self.state_dict()}
        states = [state for optimizer in self.optimizers or () for state in optimizer["state"].values()]
        undivided = [value for state in states for value in state.values() if isinstance(value, Undivided)]
        if self.optimizers is not None and undivided:
            saved["optimizer_states"] = _Withheld(undivided[0], len(self.optimizers))
        elif self.optimizers is not None:
            saved["optimizer_states"] = [
                {key: whole(value) for key, value in optimizer.items() if key not in _DIVIDED}
                | {
                    "state": {
                        key: {what: whole(value) for what, value in state.items()}
                        for key, state in optimizer["state"].items()
                    },
                    "param_groups": optimizer["param_groups"],
                }
                for optimizer in self.optimizers
            ]
        return saved

    def trained_names(self) -> set[str]:
        """Names of the parameters that optimizers stepped; of all weights if only numbers are known."""
        if PARAMETERS in self.extras:
            return {name for optimizer in self.extras[PARAMETERS] for group in optimizer for name in group}
        keys = {key for one in self.optimizers or () for group in one["param_groups"] for key in group["params"]}
        named = keys and all(isinstance(key, str) for key in keys)
        return keys if named else set(map(plain_name, self.weights))

    def named_optimizers(self, names: Sequence[Sequence[Sequence[str]]]) -> list[SavedOptimizer]:
        """States and groups by names.

        Args:
            names: Names in each group of each optimizer of the run that goes on, for checkpoints that number parameters
                and don't say their names.

        Raises:
            ValueError: If the checkpoint holds weights alone, or other numbers of optimizers or parameters.
        """
        if self.optimizers is None:
            raise ValueError(
                f"`ckpt_path={str(self.path)!r}` holds weights alone, without optimizer states to go on training from. "
                "Start a new optimizer from them: `load_full_weights: true` of `ZeroStrategy`, or the model's "
                "`pretrained` after `memfit export`."
            )
        if len(self.optimizers) != len(names):
            raise ValueError(
                f"`ckpt_path={str(self.path)!r}` has {len(self.optimizers)} optimizers, this run {len(names)}. Make "
                "them as the saved run did, or load the weights alone."
            )
        saved = self.extras.get(PARAMETERS, names)
        return [
            numbered_optimizer(optimizer, of_optimizer, self.path)
            for optimizer, of_optimizer in zip(self.optimizers, saved, strict=True)
        ]


def plain_name(name: str) -> str:
    """A name in a module without what `torch.compile` has put into it."""
    return name.replace("_orig_mod.", "")


def named_versions(saved: Versions | None, own: Versions | None) -> Versions | None:
    """Versions of a checkpoint under the names of a module, whose own they are if the checkpoint has none.

    Args:
        saved: Those of the checkpoint.
        own: Those of the module; None if its names aren't known.
    """
    if saved is None or own is None:
        return own if saved is None else saved
    known = {_plain_module(name): versions for name, versions in saved.items()}
    return {name: known[_plain_module(name)] for name in own if _plain_module(name) in known}


def _plain_module(name: str) -> str:
    return plain_name(f"{name}.")[:-1]


def group_names(optimizers: Iterable[Any], names: Mapping[int, str]) -> list[list[list[str]]]:
    """Names of the parameters in each group of each optimizer.

    Args:
        optimizers: Optimizers of whole parameters.
        names: Names of their parameters by `id`.
    """
    return [
        [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def parameter_names(module: nn.Module, optimizers: Iterable[Any] = ()) -> dict[int, str]:
    """Names of a module's parameters by `id`, without the prefix that `torch.compile` gives them.

    Args:
        module: The module.
        optimizers: Tensors of theirs that are no parameters of the module, such as a temperature that is learned
            beside it, are named by their places: `optimizer_0.3`.
    """
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(held):
            names.setdefault(id(parameter), f"optimizer_{number}.{place}")
    return names


def check_trained(
    path: str | Path, saved: Collection[str], groups: Sequence[Sequence[Sequence[str]]], module: nn.Module
) -> None:
    """Refuse to go on with a parameter that the saved run didn't train: it has no optimizer states.

    States that are only numbered would be given to other parameters than those that they were of.

    Args:
        path: The checkpoint, for messages.
        saved: Names of the parameters that the saved run trained.
        groups: Names in each group of each optimizer of this run, from `group_names`.
        module: The module; parameters that it has frozen need no states.

    Raises:
        ValueError: Naming the first of them.
    """
    own = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    names = (name for optimizer in groups for group in optimizer for name in group if name in own)
    new = [name for name in names if name not in saved and own[name].requires_grad]
    if new:
        raise ValueError(
            f"`ckpt_path={str(path)!r}` has no optimizer states for {listed(new)}, which this run trains. Freeze what "
            "is new (`requires_grad_(False)`), or start a new optimizer from the weights alone: `load_full_weights: "
            "true` of `ZeroStrategy`, or the model's `pretrained` after `memfit export`."
        )


def check_left_out(
    path: str | Path, saved: Iterable[SavedOptimizer], groups: Sequence[Sequence[Sequence[str]]], module: nn.Module
) -> None:
    """Refuse to go on without a parameter that the saved run's optimizers had, as far as the module has it.

    Args:
        path: The checkpoint, for messages.
        saved: Its optimizers.
        groups: Names in each group of each optimizer of this run, from `group_names`.
        module: The module.

    Raises:
        ValueError: Naming the first of them.
    """
    kept = {name for optimizer in groups for group in optimizer for name in group}
    own = {plain_name(name) for name, _ in module.named_parameters()}
    before = [name for optimizer in saved for group in optimizer.groups for name in group["params"]]
    left_out = [name for name in before if name in own and name not in kept]
    if left_out:
        raise ValueError(
            f"`ckpt_path={str(path)!r}` has {listed(left_out)} in an optimizer, and no optimizer of this run has them. "
            "Give them all to the optimizer in `configure_optimizers`, those that are frozen for now, too. A callback "
            "that adds groups while it trains (`BackboneFinetuning`) can't add them again before they are loaded here; "
            "under `strategy=memfit_ddp` it can."
        )


def check_names(path: str | Path, saved: Iterable[str], live: Iterable[str], module: nn.Module) -> None:
    """Refuse a checkpoint whose weights have other names than the module's.

    Args:
        path: The checkpoint, for messages.
        saved: Names in the checkpoint.
        live: Names in the module's state dict.
        module: The module.

    Raises:
        ValueError: Naming the first of them.
    """
    missing = sorted({*live} - {*saved})
    unexpected = sorted({*saved} - {*live})
    if missing or unexpected:
        found = [f"has no {listed(missing)}"] if missing else []
        found += [f"has {listed(unexpected)}, which this run's module has not"] if unexpected else []
        raise ValueError(
            f"`ckpt_path={str(path)!r}` {' and '.join(found)}. Build the module as the saved run did, or set its "
            "`strict_loading = False`."
        )


def check_shapes(path: str | Path, saved: Mapping[str, Any], module: nn.Module) -> None:
    """Refuse a checkpoint with weights of other shapes than the module's, which ZeRO may have divided.

    Raises:
        ValueError: Naming the first of them.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        shape, found = torch.Size(getattr(tensor, "ds_shape", tensor.shape)), getattr(saved.get(name), "shape", None)
        if found is not None and found != shape:
            raise ValueError(
                f"`ckpt_path={str(path)!r}` has {name!r} of shape {tuple(found)}, this run's module of "
                f"{tuple(shape)}. Build the module as the saved run did."
            )


def check_versions(path: str | Path, saved: Versions | None, module: nn.Module) -> None:
    """Refuse weights of modules that have changed their format since, where nothing changes them to the new one.

    Args:
        path: The checkpoint.
        saved: Its versions, by this module's names; None if nothing is known of them.
        module: The module.

    Raises:
        ValueError: Naming the first of the modules.
    """
    for name, own in versions_in(module).items():
        found = (saved or {}).get(name, {}).get("version")
        if found is not None and own["version"] is not None and found != own["version"]:
            raise ValueError(
                f"`ckpt_path={str(path)!r}` has weights of version {found} of {name!r}, this run's has version "
                f"{own['version']}, and under ZeRO nothing would change them. Load it once on one device "
                "(`load_from_checkpoint`), save it anew, and go on from that."
            )


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are, for messages."""
    return ", ".join(repr(name) for name in names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
