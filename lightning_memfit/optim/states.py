"""`Resume`: load the states that one optimizer saved into the 8-bit or 32-bit form of the same family.

States of 32 bits have torch's names, those of bitsandbytes its own (`state1`, `absmax1`, `qmap1`). States of another
family, or of a class whose states mean nothing elsewhere, are refused before anything is loaded.

Written for bitsandbytes 0.50; `tests/numerics/optim/test_states.py` fails when its names move.
"""

from collections.abc import Mapping, MutableMapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memfit.optim.optimizers import KERNELS
from lightning_memfit.optim.steps import OwnHook

State: TypeAlias = dict[str, Any]
StateDict: TypeAlias = dict[str, Any]

MOMENTS = {
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
}
"""Moments of the families whose states can be converted, in torch's names and in the order of bitsandbytes' numbers."""
NUMBERED = ("state1", "state2")
"""bitsandbytes' names of the first two moments."""
BLOCK_SIZE = 256  # elements that share one scale, fixed in bitsandbytes' kernels
RECORD = "lightning_memfit"
"""Key of an optimizer's state dict under which it says what it was."""
FROM_WEIGHTS = "start from the weights alone (load_from_checkpoint)"
_WRAPPED = "__bnb_optimizer_quant_state__"
_RESUME = "memfit_resume"


def flat(state: Mapping[str, Any]) -> State:
    """A parameter's state with the tensors that bitsandbytes hides in a dict of their own."""
    return {**{key: value for key, value in state.items() if key != _WRAPPED}, **state.get(_WRAPPED, {})}


def moments_of(state: Mapping[str, Any], family: str) -> tuple[int, dict[str, Tensor]]:
    """Number of steps, and the moments in float32 by torch's names, of a state of 8 or 32 bits."""
    state = flat(state)
    names = MOMENTS[family]
    keys = dict(zip(names, NUMBERED if NUMBERED[0] in state else names, strict=False))
    moments = {name: _wide(state, key) for name, key in keys.items() if state.get(key) is not None}
    return int(state.get("step", 1)), moments


def _wide(state: State, key: str) -> Tensor:
    value: Tensor = state[key]
    if value.dtype is not torch.uint8:
        return value.to(torch.promote_types(value.dtype, torch.float32))
    from bitsandbytes.functional import dequantize_blockwise

    scales, table = (state[key.replace("state", name)] for name in ("absmax", "qmap"))
    return dequantize_blockwise(value, absmax=scales, code=table, blocksize=BLOCK_SIZE)


def family_of(state_dict: StateDict) -> str | None:
    """Family of a state dict without a record: "" if it is of no known one, None if there are no states."""
    state = next((flat(state) for state in state_dict["state"].values() if state), None)
    if state is None:
        return None
    group, found = state_dict["param_groups"][0], set(state) - {"step"}
    if set(NUMBERED) <= found:
        # AdEMAMix stacks two moments in the first.
        return "Adam" if state["state1"].dim() == state["state2"].dim() else ""
    if NUMBERED[0] in found:  # of these bitsandbytes' groups have equal keys, but only Lion has two decays
        return "" if group.get("eps") else "Lion" if group["betas"][1] else "SGD"
    if "amsgrad" in group and found >= set(MOMENTS["Adam"][:2]):
        return "Adam"
    return "SGD" if "dampening" in group and found == set(MOMENTS["SGD"]) else ""


def refuse_other_family(state_dict: StateDict, family: str, class_name: str) -> None:
    """Raise a `ValueError` for states that an optimizer would take for something else."""
    record = state_dict.get(RECORD)
    if record is not None:
        way = " and ".join(record["techniques"])
        same = record["class"] == class_name or (family and record["family"] == family)
        found = f"{_kind(record['family'], record['class'])}, written with {way},"
    else:
        way, theirs = "the optimizer they are of", family_of(state_dict)
        same, found = theirs in (None, family), theirs or "an unknown family"
    if not same:
        raise ValueError(
            f"`ckpt_path`: its optimizer states are of {found} and can't go on as those of "
            f"{_kind(family, class_name)}. Resume with {way}, or {FROM_WEIGHTS}."
        )


def _kind(family: str, class_name: str) -> str:
    return f"{family} ({class_name})" if family else class_name


_LIKE_PARAMETER = {
    *chain(NUMBERED, *MOMENTS.values()),
    *("variance", "sum", "exp_inf", "square_avg", "grad_avg", "acc_delta", "prev", "step_size", "ax"),
}
"""States of torch, bitsandbytes, torchao and transformers that have their parameter's shape."""


def refuse_shapes(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Raise a `ValueError` for states of other parameters: fused kernels would write beyond the end of a tensor."""
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups, strict=False)):
        if len(saved["params"]) != len(group["params"]):
            return  # which torch refuses
        for place, (number, parameter) in enumerate(zip(saved["params"], group["params"], strict=True)):
            shape = tuple(parameter.shape)
            for key, value in flat(state_dict["state"].get(number, {})).items():
                is_like = isinstance(value, Tensor) and key in _LIKE_PARAMETER
                if is_like and tuple(value.shape) not in (shape, (2, *shape)):  # two of bitsandbytes' AdEMAMix
                    raise ValueError(
                        f"`ckpt_path`: its `{key}` for parameter {place} of group {index} has shape "
                        f"{tuple(value.shape)}, but that parameter has shape {shape}. Give the optimizer the "
                        f"parameters in the order of the checkpoint, or {FROM_WEIGHTS}."
                    )


def lay_out(parameter: Tensor, state: MutableMapping[str, Any]) -> None:
    """Keep a parameter's gradient and states in the order in which its own elements lie in memory.

    Fused kernels on the CPU walk through memory, whatever strides say: states that were saved of channels-last weights
    would go to other elements of contiguous ones. Those of bitsandbytes stay, whose kernels expect another order.
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


def has_gaps(parameter: Tensor) -> bool:
    """Whether a parameter's elements leave out some of its memory, or share it: `nn.Parameter(whole[:, ::2])`.

    Fused kernels walk through memory all the same, and step what lies between.
    """
    if parameter.layout is not torch.strided or is_traceable_wrapper_subclass(parameter):
        return False
    return parameter.stride() != torch.empty_like(parameter, device="meta").stride()


class Resume(OwnHook):
    """Makes an optimizer's state dict say what it is, and lets it load what others of its family have saved.

    Groups of the checkpoint count, as in torch, except for the kernel (`foreach`, `fused`).

    Args:
        family: A key of `MOMENTS`, or "" if states of this class mean nothing to other classes.
        class_name: The class, such as `torch.AdamW`.
        technique: What to say to resume in the same way, such as `Optimizer8bit()`.
    """

    def __init__(self, family: str, class_name: str, technique: str) -> None:
        self.family = family
        self.class_name = class_name
        self.techniques = [technique]

    @staticmethod
    def of(optimizer: Optimizer) -> "Resume | None":
        """The one attached to an optimizer."""
        return getattr(optimizer, _RESUME, None)

    @staticmethod
    def was_made_by(optimizer: Optimizer, technique: str) -> bool:
        """Whether a technique has made this optimizer, in an earlier run of a module that keeps it."""
        resume = Resume.of(optimizer)
        return resume is not None and technique in resume.techniques

    def attach(self, optimizer: Optimizer, original: Optimizer) -> None:
        """Attach to an optimizer that was made from another, whose techniques are remembered."""
        before = Resume.of(original)
        if before is not None:
            self.techniques = [*before.techniques, *self.techniques]
        setattr(optimizer, _RESUME, self)
        optimizer.register_state_dict_post_hook(self.mark)
        optimizer.register_load_state_dict_pre_hook(self.adapt)
        optimizer.register_load_state_dict_post_hook(self.lay_out)

    def mark(self, optimizer: Optimizer, state_dict: StateDict) -> None:
        """Write into a state dict what it is."""
        state_dict[RECORD] = {"family": self.family, "class": self.class_name, "techniques": list(self.techniques)}

    def adapt(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """Return a state dict that this optimizer can load.

        Raises:
            ValueError: If the states are of another family or of other parameters.
        """
        refuse_other_family(state_dict, self.family, self.class_name)
        refuse_shapes(optimizer, state_dict)
        saved, current = state_dict["param_groups"], optimizer.param_groups
        if len(saved) != len(current):
            return state_dict  # which torch refuses
        groups = [self.loaded_group(*pair, index) for index, pair in enumerate(zip(saved, current, strict=True))]
        numbers = chain.from_iterable(group["params"] for group in saved)
        by_number = dict(zip(numbers, chain.from_iterable(group["params"] for group in current), strict=False))
        states = {
            number: self.restored(optimizer, by_number[number], state) if number in by_number and state else state
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states, "param_groups": groups}

    def lay_out(self, optimizer: Optimizer) -> None:
        """Keep loaded states in the order of their parameters."""
        lay_out_all(optimizer)

    def restored(self, optimizer: Optimizer, parameter: Tensor, state: State) -> State:
        """The state of one parameter in this optimizer's form; here in torch's."""
        if NUMBERED[0] not in flat(state):
            return state
        step, moments = moments_of(state, self.family)
        return moments if self.family == "SGD" else {"step": torch.tensor(float(step)), **moments}

    def loaded_group(self, saved: Mapping[str, Any], current: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A saved group, with what this optimizer alone knows and the kernel that it was given."""
        return {**current, **{key: value for key, value in saved.items() if key not in KERNELS}}
