"""`Resume`: load the states that one optimizer saved into another of its family.

torch, bitsandbytes and torchao keep the same moments under other names and in other widths. Widening to 32 bits keeps
every value; narrowing rounds as the optimizer itself does after each step. States of another family, or of a class
whose states mean nothing elsewhere, are refused before anything is loaded.

bitsandbytes' 8-bit format: Dettmers et al., 2022, arXiv 2110.02861, section 2. Written for bitsandbytes 0.50
(`state1`, `absmax1`, `qmap1`) and torchao 0.18; `tests/numerics/optim/test_states.py` fails when these move.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memfit.optim.optimizers import KERNELS, class_of, optimizer_classes
from lightning_memfit.optim.steps import OwnHook

State: TypeAlias = dict[str, Any]
StateDict: TypeAlias = dict[str, Any]

MOMENTS = {
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdEMAMix": ("exp_avgs", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "Lion": ("exp_avg",),
}
"""Moments of the families whose states can be converted, in torch's names and in the order of bitsandbytes' numbers."""
NUMBERED = ("state1", "state2")
"""bitsandbytes' names of the first two moments."""
BLOCK_SIZE = 256  # elements that share one scale, fixed in bitsandbytes' kernels
RECORD = "lightning_memfit"
"""Key of an optimizer's state dict under which it says what it was."""
COMPENSATION = "compensation"
"""State of a bfloat16 weight: what the last step's rounding dropped (`rounding.Kahan`)."""
FLOAT32_STEP = "float32_step"
"""Key under which `Float32Step` saves how it rounds."""
_WRAPPED = "__bnb_optimizer_quant_state__"


# --- values -----------------------------------------------------------------------------------------------------------


def dequantize(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Widen bitsandbytes' 8-bit values to float32: the values with which its next step would compute.

    Args:
        codes: Indices into `table`, uint8; AdEMAMix stacks two moments along the first dimension.
        scales: One scale per 256 elements; shape (blocks,), or (2, blocks) for stacked moments.
        table: The 256 values of the quantization map.

    Raises:
        ValueError: If the number of scales is not that of blocks of 256 elements.
    """
    if scales.dim() == 2:
        return torch.stack([dequantize(c, s, table) for c, s in zip(codes, scales, strict=True)])
    if scales.numel() != -(-codes.numel() // BLOCK_SIZE):
        raise ValueError(
            f"`ckpt_path`: 8-bit states of shape {tuple(codes.shape)} have {scales.numel()} scales, which is not one "
            f"per {BLOCK_SIZE} elements. Another version of bitsandbytes wrote them; start from the weights alone."
        )
    values = table.float()[codes.reshape(-1).int()]
    whole = codes.numel() // BLOCK_SIZE
    values[: whole * BLOCK_SIZE].view(whole, BLOCK_SIZE).mul_(scales[:whole, None])
    values[whole * BLOCK_SIZE :].mul_(scales[whole:])
    return values.view(codes.shape)


def apart(value: Any) -> Any:
    """Take a tensor subclass of torchao apart into plain tensors, as Lightning's loading can't restore subclasses."""
    if not is_traceable_wrapper_subclass(value):
        return value
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    return {"class": type(value).__name__, "parts": parts, "context": context}


def together(value: Any) -> Any:
    """Make the tensor subclass that `apart` took apart."""
    if not (isinstance(value, dict) and "parts" in value):
        return value
    kind = getattr(import_module("torchao.optim.adam"), value["class"])
    return kind.__tensor_unflatten__(value["parts"], value["context"])


def flat(state: Mapping[str, Any]) -> State:
    """A parameter's state with the tensors that bitsandbytes hides in a dict of their own."""
    return {**{key: value for key, value in state.items() if key != _WRAPPED}, **state.get(_WRAPPED, {})}


def moments_of(state: Mapping[str, Any], family: str) -> tuple[int, dict[str, Tensor]]:
    """Number of steps, and the moments in float32 by torch's names, whoever wrote the state.

    Raises:
        ValueError: If 8-bit states are of an unknown format.
    """
    state = flat(state)
    step = state.get("step", 1)
    names = MOMENTS[family]
    if NUMBERED[0] in state:
        keys = dict(zip(names, NUMBERED, strict=False))
    elif family == "Lion":
        keys = dict.fromkeys(names, _only_tensor(state))
    else:
        keys = {name: name for name in names}
    return int(step), {name: _wide(state, key) for name, key in keys.items() if state.get(key) is not None}


def _only_tensor(state: State) -> str:
    """Classes called Lion name their only moment as they like."""
    keys = [key for key, value in state.items() if key != "step" and (isinstance(value, Tensor) or "parts" in value)]
    if len(keys) != 1:
        raise ValueError(
            f"`ckpt_path`: a state of Lion has one moment, but this one has {', '.join(sorted(state))}. Start from the "
            "weights alone (load_from_checkpoint)."
        )
    return keys[0]


def _wide(state: State, key: str) -> Tensor:
    value: Any = together(state[key])
    if type(value) is not Tensor and hasattr(value, "dequantize"):
        wide: Tensor = value.dequantize(torch.float32)
    elif value.dtype is torch.uint8:
        wide = _wide_of_bitsandbytes(state, key)
    else:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return wide


def _wide_of_bitsandbytes(state: State, key: str) -> Tensor:
    number = key.removeprefix("state")
    scales, table = state.get(f"absmax{number}"), state.get(f"qmap{number}")
    if scales is None or table is None:
        raise ValueError(
            f"`ckpt_path`: 8-bit states lack `absmax{number}` or `qmap{number}`, so that they are not blockwise ones "
            "of bitsandbytes 0.50. Start from the weights alone (load_from_checkpoint)."
        )
    return dequantize(state[key], scales, table)


# --- families ---------------------------------------------------------------------------------------------------------


def families_of(state_dict: StateDict) -> frozenset[str]:
    """Families of which a state dict without a record can be; empty for those of other classes."""
    groups = state_dict["param_groups"]
    keys = set(groups[0]) if groups else set()
    states = (flat(state) for state in state_dict["state"].values() if state)
    state = next(states, None)
    marks = {"amsgrad": "Adam", "dampening": "SGD", "centered": "RMSprop", "t_beta3": "AdEMAMix"}
    by_groups = frozenset(family for key, family in marks.items() if key in keys)
    if state is None:
        return by_groups or frozenset(MOMENTS)
    found = set(state) - {"step"}
    if found >= set(NUMBERED):
        first, second = (state[key] for key in NUMBERED)
        return frozenset(["AdEMAMix"] if first.dim() == second.dim() + 1 else ["Adam"])
    if NUMBERED[0] in found:
        # bitsandbytes' groups of these have equal keys, but only RMSprop has an epsilon, and only Lion two decays.
        has_epsilon, second = groups[0].get("eps", 0), (*groups[0].get("betas", (0, 0)), 0)[1]
        return by_groups or frozenset(["RMSprop" if has_epsilon else "Lion" if second else "SGD"])
    if len(found) == 1 and not by_groups and "betas" in keys:
        return frozenset(["Lion"])
    return frozenset(family for family in by_groups if found and found <= set(MOMENTS[family]))


def _way(state_dict: StateDict) -> str:
    """What to resume with in order to go on as the checkpoint was written."""
    record = state_dict.get(RECORD)
    return " and ".join(record["techniques"]) if record is not None else "the optimizer they are of"


def _describe(state_dict: StateDict) -> str:
    record = state_dict.get(RECORD)
    if record is not None:
        return f"of {record['class']}, written with {_way(state_dict)}"
    keys = sorted({str(key) for state in state_dict["state"].values() for key in flat(state)})
    return f"({', '.join(keys)})" if keys else f"with groups of {', '.join(map(str, state_dict['param_groups'][0]))}"


# --- states that can't be stepped -------------------------------------------------------------------------------------

_FROM_WEIGHTS = "start from the weights alone (load_from_checkpoint)"
_LIKE_PARAMETER = {
    *(name for names in MOMENTS.values() for name in names if name != "exp_avgs"),
    *("variance", "compensation", "sum", "exp_inf", "square_avg", "acc_delta", "prev", "step_size", "ax"),
}
"""States of torch, bitsandbytes, torchao and transformers, and of `Float32Step`, that have their parameter's shape."""


def _shapes_for(key: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that a state of this name can have for a parameter of that shape; none if it is of no known kind."""
    if key in NUMBERED:
        return [shape, (2, *shape)]  # AdEMAMix stacks two moments
    if key in _LIKE_PARAMETER:
        return [shape]
    factors = {
        "exp_avgs": (2, *shape),
        "row_var": (*shape[:-1], 1),
        "col_var": (*shape[:-2], 1, *shape[-1:]),
        "exp_avg_sq_row": shape[:-1],
        "exp_avg_sq_col": (*shape[:-2], *shape[-1:]),
    }
    return [factors[key]] if key in factors else []


def _loads_into(optimizer: Optimizer, state_dict: StateDict) -> list[tuple[str, Tensor, State]]:
    """Every parameter that has a state, with its place; nothing if groups don't match, which is refused elsewhere."""
    pairs = []
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups, strict=False)):
        if len(saved["params"]) != len(group["params"]):
            return []
        for place, (number, parameter) in enumerate(zip(saved["params"], group["params"], strict=True)):
            state = state_dict["state"].get(number)
            if state:
                names = group.get("param_names")
                name = f" (`{names[place]}`)" if names else ""
                pairs.append((f"parameter {place} of group {index}{name}", parameter, flat(state)))
    return pairs


def refuse_shapes(optimizer: Optimizer, state_dict: StateDict, names: Mapping[Tensor, str] | None = None) -> None:
    """Refuse states of other parameters, with which fused kernels would write beyond the end of a tensor.

    Args:
        optimizer: The optimizer that is to load the states.
        state_dict: The states.
        names: Names of parameters, for the message.

    Raises:
        ValueError: If a state doesn't have the shape that the parameter at its place needs.
    """
    for place, parameter, state in _loads_into(optimizer, state_dict):
        shape = tuple(parameter.shape)
        for key, value in state.items():
            allowed = _shapes_for(key, shape)
            found: Any = together(value) if allowed else None
            if isinstance(found, Tensor) and tuple(found.shape) not in allowed:
                name = (names or {}).get(parameter)
                who = f"`{name}`, {place}," if name else place
                raise ValueError(
                    f"`ckpt_path`: its `{key}` for {who} has shape {tuple(found.shape)}, but that parameter has shape "
                    f"{shape}. The checkpoint is of other parameters, or has them in another order. Give the optimizer "
                    f"the parameters in the order of the checkpoint, or {_FROM_WEIGHTS}."
                )


def lay_out(parameter: Tensor, state: MutableMapping[str, Any]) -> None:
    """Keep a parameter's gradient and states in the order in which its own elements lie in memory.

    Fused kernels on the CPU walk through memory, whatever strides say: states that were saved of channels-last weights
    would go to other elements of contiguous ones. Those of bitsandbytes stay, whose kernels expect another order.

    Args:
        parameter: Parameter of an optimizer.
        state: Its state. A tensor of the parameter's shape that lies otherwise is exchanged for one of equal values.
    """
    if parameter.layout is not torch.strided:
        return
    strides, gradient = parameter.stride(), parameter.grad
    if gradient is not None and gradient.layout is torch.strided and gradient.stride() != strides:
        parameter.grad = _laid_out(parameter, gradient)
    for key, value in state.items():
        is_plain = type(value) is Tensor and value.layout is torch.strided
        if is_plain and value.stride() != strides and key not in NUMBERED:
            state[key] = _laid_out(parameter, value)


def has_gaps(parameter: Tensor) -> bool:
    """Whether a parameter's elements leave out some of its memory, or share it: `nn.Parameter(whole[:, ::2])`.

    Fused kernels walk through memory all the same, and step what lies between.
    """
    if parameter.layout is not torch.strided or is_traceable_wrapper_subclass(parameter):
        return False
    return parameter.stride() != torch.empty_like(parameter, device="meta").stride()


def lay_out_all(optimizer: Optimizer) -> None:
    """Do so for every parameter of an optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            lay_out(parameter, optimizer.state.get(parameter, {}))


def _laid_out(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy of a value in the parameter's order; the value itself if it is of another kind, or in that order."""
    if type(value) is not Tensor or value.shape != parameter.shape:
        return value
    # Of a parameter with gaps between its elements, a copy has none.
    strides = torch.empty_like(parameter, device="meta").stride()
    if value.stride() == strides:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value.detach())


def refuse_compensation(optimizer_name: str, state_dict: StateDict) -> None:
    """Raise a `ValueError` for states that hold a part of the weights, which only Kahan summation adds again."""
    if state_dict.get(FLOAT32_STEP, {}).get("rounding") == "kahan":
        raise ValueError(
            "`ckpt_path`: its optimizer states hold a part of the weights (Kahan compensation), which "
            f'{optimizer_name} would lose. Resume with StochasticRounding(rounding="kahan"), or {_FROM_WEIGHTS}.'
        )


def refuse_states(optimizer: Optimizer, state_dict: StateDict, names: Mapping[Tensor, str] | None = None) -> None:
    """Refuse, before anything is loaded, states with which an optimizer of torch would fail in its first step.

    Optimizers that have a `Resume` convert what they can themselves. Of classes that nobody has described nothing is
    known, so that only Kahan compensation is refused for them.

    Args:
        optimizer: The optimizer of the run.
        state_dict: What the checkpoint has for it.
        names: Names of parameters, for the message.

    Raises:
        ValueError: If the states are of another class, form or shape.
    """
    wrapped = getattr(optimizer, "wrapped", None)
    stepped = wrapped if isinstance(wrapped, Optimizer) else optimizer
    if stepped is optimizer:
        refuse_compensation(type(stepped).__name__, state_dict)
    elif FLOAT32_STEP not in state_dict:
        return  # `Float32Step` says so
    of_torch = type(stepped).__module__.startswith("torch.optim")
    if Resume.of(optimizer) is None:
        if not of_torch:
            return
        _refuse_other_form(stepped, state_dict)
    refuse_shapes(stepped, state_dict, names)


@contextmanager
def checked_states(
    optimizers: Iterable[Optimizer], states: Iterable[StateDict], names: Mapping[Tensor, str]
) -> Iterator[None]:
    """Refuse states before they are loaded in this context, and lay out afterwards what was loaded.

    Args:
        optimizers: Those of the run.
        states: What the checkpoint has for each of them.
        names: Names of parameters, for messages.

    Raises:
        ValueError: As `refuse_states` does.
    """
    pairs = list(zip(optimizers, states, strict=False))
    for optimizer, state_dict in pairs:
        refuse_states(optimizer, state_dict, names)
    yield
    for optimizer, _ in pairs:
        lay_out_all(optimizer)


_NEEDED = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg",),
    "SGD": (),
    "Adafactor": (),
}
"""States without which a step of torch's class fails, if there are any for the parameter."""


def _refuse_other_form(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Refuse groups and states that a class of torch can't step; it takes more than it needs."""
    name = type(optimizer).__name__
    if name not in _NEEDED:
        return
    meanings = class_of(optimizer).meanings
    # torch itself fills in switches that old checkpoints lack.
    needed = {key for key in meanings if not isinstance(optimizer.defaults.get(key), bool)}
    own = {*_NEEDED[name], "momentum_buffer", "max_exp_avg_sq", "grad_avg", "row_var", "col_var", "variance"}
    fits = all(needed <= set(group) for group in state_dict["param_groups"]) and all(
        set(_NEEDED[name]) <= set(state) and all(_is_plain_moment(value) for key, value in state.items() if key in own)
        for state in (flat(state) for state in state_dict["state"].values() if state)
    )
    if fits:
        return
    record = state_dict.get(RECORD)
    if record is not None and record["class"].rpartition(".")[2] in ("Adam", "AdamW", "RMSprop", "SGD"):
        convert = f', with ReplaceOptimizer("{record["class"]}"), which converts them'
    else:
        convert = ""
    raise ValueError(
        f"`ckpt_path`: optimizer states {_describe(state_dict)}, are none that torch.{name} can step. Resume with "
        f"{_way(state_dict)}{convert}, or {_FROM_WEIGHTS}."
    )


def _is_plain_moment(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()))


# --- resuming ---------------------------------------------------------------------------------------------------------


class Resume(OwnHook):
    """Makes an optimizer's state dict say what it is, and lets it load what others of its family have saved.

    Groups of the checkpoint count, as in torch, except for the kernel (`foreach`, `fused`): a learning rate that a
    schedule has reached goes on. Hyper-parameters get this optimizer's names; one that is set and has no counterpart
    is refused.

    Args:
        family: A key of `MOMENTS`, or "" if states of this class mean nothing to other classes.
        class_name: The class, such as `torch.AdamW`.
        technique: What to say to resume in the same way, such as `Optimizer8bit()`.
        options: Hyper-parameters that were asked for, and that a checkpoint must not undo.
    """

    def __init__(self, family: str, class_name: str, technique: str, options: Mapping[str, Any] | None = None) -> None:
        self.family = family
        self.class_name = class_name
        self.techniques = [technique]
        self.options = dict(options or {})

    @staticmethod
    def of(optimizer: Optimizer) -> "Resume | None":
        """The one attached to an optimizer."""
        hooks = optimizer._optimizer_state_dict_post_hooks.values()
        owners = (getattr(hook, "__self__", None) for hook in hooks)
        return next((owner for owner in owners if isinstance(owner, Resume)), None)

    def attach(self, optimizer: Optimizer, original: Optimizer) -> None:
        """Attach to an optimizer that was made from another, whose techniques are remembered."""
        before = Resume.of(original)
        if before is not None:
            self.techniques = [*before.techniques, *self.techniques]
        optimizer.register_state_dict_post_hook(self.mark)
        optimizer.register_load_state_dict_pre_hook(self.adapt)
        optimizer.register_load_state_dict_post_hook(self.lay_out)

    def mark(self, optimizer: Optimizer, state_dict: StateDict) -> None:
        """Write into a state dict what it is."""
        state_dict[RECORD] = {
            "family": self.family,
            "class": self.class_name,
            "techniques": list(self.techniques),
            "options": dict(self.options),
        }

    def adapt(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """Return a state dict that this optimizer can load.

        Raises:
            ValueError: If the states are of another family or of other parameters, or hyper-parameters have no
                counterpart.
        """
        refuse_compensation(self.class_name, state_dict)
        self._refuse_other_family(state_dict)
        saved, current = state_dict["param_groups"], optimizer.param_groups
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in current]:
            raise ValueError(
                f"`ckpt_path`: its groups have {[len(group['params']) for group in saved]} parameters, those of this "
                f"run's {type(optimizer).__name__} {[len(group['params']) for group in current]}. Return the groups "
                "that the checkpoint was written with, or start from the weights alone (load_from_checkpoint)."
            )
        refuse_shapes(optimizer, state_dict)
        numbers = chain.from_iterable(group["params"] for group in saved)
        parameters = chain.from_iterable(group["params"] for group in current)
        groups = [self._group(was, now, state_dict) for was, now in zip(saved, current, strict=True)]
        for index, group in enumerate(groups):
            self.refuse_group(group, index)
        by_number = dict(zip(numbers, parameters, strict=True))
        states = {
            number: self._restored(optimizer, by_number[number], state) if number in by_number and state else state
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states, "param_groups": groups}

    def lay_out(self, optimizer: Optimizer) -> None:
        """Keep loaded states in the order of their parameters."""
        lay_out_all(optimizer)

    def _restored(self, optimizer: Optimizer, parameter: Tensor, state: State) -> State:
        """The state in this optimizer's form, with what `Float32Step` keeps there, which belongs to no form."""
        made = self.restored(optimizer, parameter, {key: state[key] for key in state if key != COMPENSATION})
        return {**made, COMPENSATION: state[COMPENSATION]} if COMPENSATION in state else made

    def restored(self, optimizer: Optimizer, parameter: Tensor, state: State) -> State:
        """The state of one parameter in this optimizer's form; here in torch's."""
        if not self.family or (set(state) <= {"step", *MOMENTS[self.family]} and _are_plain(state)):
            return state
        step, moments = moments_of(state, self.family)
        return moments if self.family == "SGD" else {"step": torch.tensor(float(step)), **moments}

    def refuse_group(self, group: Mapping[str, Any], index: int) -> None:
        """Raise a `ValueError` if this optimizer would ignore a loaded hyper-parameter."""

    def _refuse_other_family(self, state_dict: StateDict) -> None:
        record = state_dict.get(RECORD)
        if record is not None:
            same = record["class"] == self.class_name or (self.family and record["family"] == self.family)
        elif self.family:
            same = self.family in families_of(state_dict)
        else:
            meanings = optimizer_classes()[self.class_name].meanings
            same = all(set(meanings) <= set(group) for group in state_dict["param_groups"])
        if same:
            return
        raise ValueError(
            f"`ckpt_path`: optimizer states {_describe(state_dict)}, can't go on as those of {self.class_name}. "
            f"Resume with {_way(state_dict)}, or start from the weights alone (load_from_checkpoint)."
        )

    def _group(self, saved: Mapping[str, Any], current: Mapping[str, Any], state_dict: StateDict) -> dict[str, Any]:
        """Hyper-parameters of a saved group in the names of the current one."""
        record = state_dict.get(RECORD) or {}
        saved = dict(_renamed(saved, current))
        values = {key: _like(saved[key], current[key]) for key in current.keys() & saved.keys() - KERNELS}
        known = set().union(*(cls.meanings for cls in optimizer_classes().values())) | _SWITCHES | KERNELS
        for key in saved.keys() - current.keys():
            if key not in known:
                values[key] = _like(saved[key], 0.0)
            elif saved[key] and key not in KERNELS and key not in _DEFAULTS_OF_BITSANDBYTES:
                raise ValueError(
                    f"`ckpt_path`: its `{key}={saved[key]!r}` has no counterpart in {self.class_name}. Resume with the "
                    "optimizer it is of, or start from the weights alone (load_from_checkpoint)."
                )
        # Groups that old versions of torch saved don't say which they are; those of others are decoupled.
        is_unknown = not record and "amsgrad" in saved
        unsaid = current.get("decoupled_weight_decay", True) if is_unknown else True
        decoupled = bool(saved.get("decoupled_weight_decay", unsaid))
        if self.family == "Adam" and "decoupled_weight_decay" in current:
            if saved.get("weight_decay") and decoupled != current["decoupled_weight_decay"]:
                kinds = {True: "decoupled", False: "an L2 penalty"}
                raise ValueError(
                    f"`ckpt_path`: its `weight_decay={saved['weight_decay']}`, `decoupled_weight_decay={decoupled}` "
                    f"is {kinds[decoupled]}, but {kinds[not decoupled]} in {self.class_name}. Resume with torch.optim."
                    f"{'AdamW' if decoupled else 'Adam'}, or {_FROM_WEIGHTS}."
                )
            values.pop("decoupled_weight_decay", None)  # that of this class, should somebody set a decay
        elif self.family == "Adam" and not decoupled and saved.get("weight_decay"):
            raise ValueError(
                f"`ckpt_path`: its `weight_decay={saved['weight_decay']}` is an L2 penalty, but decoupled in "
                f"{self.class_name}. Resume with torch.optim.Adam, or start from the weights alone."
            )
        if record.get("options") != self.options:
            for key, asked in self.options.items():
                if key in values and values[key] != asked:
                    raise ValueError(
                        f"`options.{key}={asked!r}`, but the checkpoint has {values[key]!r}, which would go on. Leave "
                        "the option out or give it that value, or start from the weights alone (load_from_checkpoint)."
                    )
        return {**current, **values, "params": saved["params"]}


_SWITCHES = {"capturable", "differentiable", "decoupled_weight_decay"}
_DEFAULTS_OF_BITSANDBYTES = {"alpha", "t_alpha", "t_beta3", "decoupled_weight_decay"}
"""Keys that bitsandbytes gives groups of optimizers that have no use for them."""


def _are_plain(state: State) -> bool:
    return not any(isinstance(value, dict) or is_traceable_wrapper_subclass(value) for value in state.values())


def _renamed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGD and RMSprop of bitsandbytes keep two hyper-parameters of torch's as `betas`."""
    for names in (("momentum", "dampening"), ("alpha", "momentum")):
        if "betas" in saved and "betas" not in current and set(names) <= set(current):
            kept = {key: value for key, value in saved.items() if key != "betas"}
            return {**kept, **dict(zip(names, saved["betas"], strict=False))}
        if "betas" in current and "betas" not in saved and set(names) <= set(saved):
            kept = {key: value for key, value in saved.items() if key not in names}
            return {**kept, "betas": tuple(saved[name] for name in names)}
    return saved


def _like(value: Any, current: Any) -> Any:
    """A hyper-parameter as a tensor where this optimizer keeps a tensor, and otherwise as a number."""
    if isinstance(current, Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device).clone()
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
