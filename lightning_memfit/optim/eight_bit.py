"""`to_bitsandbytes`: convert an optimizer that a user built to its 8-bit or paged form, with all its settings.

bitsandbytes' formulas are those of torch for AdamW, Lion, SGD with momentum and RMSprop without momentum. It would
silently ignore flags of the original that it doesn't have; here they are refused, when an optimizer is converted and
whenever it steps. Groups keep the original's hyper-parameters under the original's names, so that schedules and edits
of them count. `check_states` makes sure that states have the promised width.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_memfit.optim.optimizers import TORCH_SWITCHES, EightBitForm, optimizer_classes
from lightning_memfit.optim.paging import drop_false_marks, is_marked, paged_buffer
from lightning_memfit.optim.states import (
    BLOCK_SIZE,
    COMPENSATION,
    MOMENTS,
    NUMBERED,
    Resume,
    State,
    StateDict,
    flat,
    moments_of,
)
from lightning_memfit.optim.steps import TRIAL_RATE, OwnHook, Trial, refuse_sparse, run_closure, step_below_hooks

# --- states -----------------------------------------------------------------------------------------------------------

# Written for bitsandbytes 0.50: `Optimizer8bit.get_config`, `get_state_buffer`, `init_state`, `update_step`,
# `name2qmap`, `args`, `mng` and the state keys `state1`, `state2`, `absmax1`, `absmax2`;
# `tests/numerics/optim/test_eight_bit.py` fails when these move.


class StateWidths:
    """Decides for each parameter whether its states have 8 or 32 bits.

    bitsandbytes asks a process-wide `GlobalOptimManager`, which would change other optimizers too. This table belongs
    to one optimizer and is keyed by the parameter itself. An override that a user registered for the parameter
    (`override_config`) still counts.

    Args:
        optimizer: A bitsandbytes optimizer that has not stepped yet.
        keep_32bit: Parameters whose states stay 32-bit. They are held weakly and need not be in the optimizer.
    """

    def __init__(self, optimizer: Any, keep_32bit: Iterable[Tensor] = ()) -> None:
        self.bits: int = optimizer.args.optim_bits
        self.min_8bit_size: int = optimizer.args.min_8bit_size
        self._overrides: dict[int, dict[str, Any]] = optimizer.mng.pid2config
        self._kept = WeakIdKeyDictionary()
        for parameter in keep_32bit:
            self._kept[parameter] = True

    def bits_of(self, parameter: Tensor) -> int:
        """Promised bits per state element of one parameter."""
        return 32 if parameter.numel() < self.min_8bit_size else self.requested(parameter)

    def requested(self, parameter: Tensor) -> int:
        """Bits that are asked for, whatever the size; an empty parameter has nothing to quantize."""
        default = 32 if parameter in self._kept or not parameter.numel() else self.bits
        return int(self._overrides.get(id(parameter), {}).get("optim_bits", default))

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateWidths":
        """Return a table for copies of the parameters; of those that aren't copied, for the parameters themselves."""
        copied = copy.copy(self)
        copied._kept = WeakIdKeyDictionary()
        for parameter in self._kept:
            copied._kept[memo.get(id(parameter), parameter)] = True
        return copied


class _OnePositionTable:
    """bitsandbytes' manager of overrides, with those by (group, index) for one optimizer alone.

    The process-wide table of positions reaches every optimizer, whosever parameters it was made for.
    """

    def __init__(self, manager: Any) -> None:
        self.index2config: dict[tuple[int, int], Any] = {}
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":
            raise AttributeError(name)
        return getattr(self._manager, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OnePositionTable":
        return _OnePositionTable(self._manager)


def check_states(optimizer: Any) -> None:
    """Check that existing states have the promised width, shape and number of scales, without reading values.

    Args:
        optimizer: An optimizer made by `to_bitsandbytes`, after a step.

    Raises:
        RuntimeError: If a state differs; the message names the parameter's shape, the state found and that promised.
    """
    for parameter, state in optimizer.state.items():
        if not parameter.numel():
            continue
        bits = optimizer.state_widths.bits_of(parameter)
        expected = torch.uint8 if bits == 8 else torch.float32
        for key in NUMBERED:
            if key not in state:
                continue
            moment = state[key]
            if moment.dtype is not expected or moment.numel() % parameter.numel():
                raise RuntimeError(_complaint(optimizer, parameter, key, moment, bits))
            scales = state.get(key.replace("state", "absmax"))
            num_scales = -(-parameter.numel() // BLOCK_SIZE) * (moment.numel() // parameter.numel())
            if bits == 8 and (scales is None or scales.numel() != num_scales):
                raise RuntimeError(_complaint(optimizer, parameter, key, scales, bits))


def _complaint(optimizer: Any, parameter: Tensor, key: str, found: Tensor | None, bits: int) -> str:
    what = "nothing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
    return (
        f"{type(optimizer).__name__} was to keep {bits}-bit states for a parameter of shape {tuple(parameter.shape)}, "
        f"but its {key!r} holds {what}. Another library changed bitsandbytes' settings, or a checkpoint with other "
        "states was loaded; use the settings the checkpoint was written with, or start from its weights only."
    )


def repage_states(optimizer: Any) -> int:
    """Page the states of a paged optimizer again where they have become ordinary tensors.

    Loading and moving an optimizer's states to a device make such, and so does copying it. Those that bitsandbytes
    doesn't page go to the device of their parameter.

    Returns:
        Number of state tensors moved to paged memory (0 on the CPU, where nothing is paged).
    """
    if not optimizer.is_paged:
        return 0
    drop_marks_of_copies(optimizer)
    moved = 0
    for parameter, state in optimizer.state.items():
        for key in NUMBERED:
            moment = state.get(key)
            if moment is None or parameter.device.type == "cpu" or is_marked(moment):
                continue
            is_stacked = moment.dim() > parameter.dim()  # AdEMAMix has two moments in one tensor
            make = optimizer._get_state_double_buffer if is_stacked else optimizer.get_state_buffer
            buffer = make(parameter, dtype=moment.dtype)
            if is_marked(buffer):
                buffer.copy_(moment)
                state[key] = buffer
                moved += 1
            elif moment.device != parameter.device:  # bitsandbytes pages nothing under 1e5 elements
                state[key] = moment.to(parameter.device)
    return moved


def drop_marks_of_copies(optimizer: Any) -> None:
    """Take marks of paged memory off states that are copies in ordinary memory."""
    values = (value for state in optimizer.state.values() for value in state.values())
    drop_false_marks(value for value in values if isinstance(value, Tensor))


def _stepped(optimizer: torch.optim.Optimizer) -> Any:
    return getattr(optimizer, "wrapped", optimizer)


def is_paged(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `to_bitsandbytes` has made an optimizer, or the one that it wraps, with paged states."""
    own = _stepped(optimizer)
    return is_converted(own) and bool(own.is_paged)


def check_again(optimizer: torch.optim.Optimizer) -> None:
    """Check the states of an optimizer and page them again, after something has replaced them.

    Args:
        optimizer: Any; of those that `to_bitsandbytes` didn't make, nor wraps, nothing is checked.

    Raises:
        RuntimeError: If a state is none that was promised.
    """
    own = _stepped(optimizer)
    if is_converted(own):
        own.checks.num_checked = 0
        own.checks(own)


def make_maps_fake(optimizer: Any) -> None:
    """Give an optimizer of fake parameters fake quantization maps, so that it can step under `FakeTensorMode`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fake = parameter.data
            if isinstance(fake, FakeTensor):
                maps = {name: fake.fake_mode.from_tensor(table) for name, table in optimizer.name2qmap.items()}
                optimizer.name2qmap = maps
                return


def embedding_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Weights of all embeddings in a module, each once. A head tied to an embedding is the same parameter."""
    found: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            for parameter in owner.parameters(recurse=False):
                found.setdefault(id(parameter), parameter)
    return list(found.values())


# --- stepping ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A class of bitsandbytes, and what of an original's groups it computes."""

    stem: str
    """Class name in `bitsandbytes.optim` without `Paged` and `8bit`."""
    record: EightBitForm
    ignored: frozenset[str] = frozenset()
    """Hyper-parameters of the original of which bitsandbytes knows nothing; they must be off."""

    @property
    def family(self) -> str:
        """Key of `states.MOMENTS`."""
        return "Adam" if self.stem == "AdamW" else self.stem

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        """Reason why this group's hyper-parameters cannot be kept."""
        for name, value in self.record.required.items():
            of_decay = name == "decoupled_weight_decay" and not group.get("weight_decay")
            if name in group and group[name] != value and not of_decay:
                return f"bitsandbytes ignores `{name}={group[name]!r}`; it computes what {name}={value!r} means"
        if self.stem == "Adam" and group.get("weight_decay") and not group.get("decoupled_weight_decay", False):
            return (
                f"`weight_decay={group['weight_decay']}` is added to the gradient by torch's Adam but decoupled by "
                "bitsandbytes; use AdamW or weight_decay=0"
            )
        if self.stem == "SGD" and not group.get("momentum", True):
            return "SGD with `momentum=0` has no states that could be made smaller"
        if isinstance(group["lr"], Tensor):
            return "bitsandbytes takes no tensor as `lr`; pass a float"
        on = sorted(name for name in self.ignored if group.get(name))
        return f"bitsandbytes has no counterpart of {', '.join(f'`{name}`' for name in on)}" if on else None

    def translate(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Hyper-parameters in the names that bitsandbytes reads."""
        betas = self.record.betas
        named = {name: value for name, value in group.items() if name not in betas}
        return {**named, "betas": tuple(group[name] for name in betas)} if betas else named


_Upstream: Any = object
"""Stands for the class of bitsandbytes that follows in the order of bases."""


class _Guarded(_Upstream):  # type: ignore[misc]
    """What comes before a class of bitsandbytes: it reads groups of the original, and refuses what it can't step."""

    upstream: type[Any]
    """The class of bitsandbytes that steps."""
    form: Form
    state_widths: StateWidths
    upstream_defaults: dict[str, Any]
    checks: "_Checks"

    @override
    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        translated = {**self.upstream_defaults, **self.form.translate(group)}
        config: dict[str, Any] = super().get_config(gindex, pindex, translated)
        config["optim_bits"] = self.state_widths.requested(group["params"][pindex])
        return config

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        self._refuse()
        step_below_hooks(self, self.upstream)
        return loss

    @override
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        if not p.numel():
            return
        where = p.data
        state = self.state[p]
        number = int(state["step"])
        try:
            super().update_step(group, p, gindex, pindex)
        finally:
            if int(state["step"]) != number:
                # Kernels write past torch, whose counters tell `StepGuard` and autograd that tensors have changed.
                increment_version([p, *(value for value in state.values() if isinstance(value, Tensor))])
        if not where.is_contiguous():
            # bitsandbytes has moved it to contiguous memory, away from whatever else refers to its own.
            where.copy_(p.data)
            p.data = where

    @override
    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        # Kernels walk through states in the order of a contiguous parameter.
        like = p if p.is_contiguous() else torch.empty_like(p, memory_format=torch.contiguous_format)
        return self._paged(p, p.shape, dtype, functools.partial(super().get_state_buffer, like, dtype))

    def _get_state_double_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What AdEMAMix makes for two moments in one tensor."""
        make = functools.partial(super()._get_state_double_buffer, p, dtype)
        return self._paged(p, (2, *p.shape), dtype, make)

    def _paged(
        self, parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]
    ) -> Tensor:
        is_paged = self.is_paged and parameter.device.type != "cpu"
        return paged_buffer(shape, dtype, parameter.device, make) if is_paged else make()

    @override
    def state_dict(self) -> StateDict:
        """Return bitsandbytes' states; those of 32 bits by torch's names, which torch's optimizers can load."""
        saved: StateDict = super().state_dict()
        resume = Resume.of(self)
        if resume is not None and resume.class_name.startswith("torch."):
            if self.args.optim_bits == 32:
                states = saved["state"].items()
                saved["state"] = {number: _plain(flat(state), self.form.family) for number, state in states}
            elif self.form.family == "SGD":
                # torch's SGD would start with new momenta where it finds none; of a number it makes an error.
                for state in saved["state"].values():
                    state[MOMENTS["SGD"][0]] = self.args.optim_bits
        return saved

    @override
    def load_state_dict(self, state_dict: StateDict, move_to_device: bool = True) -> None:
        """Load what this optimizer or one of its family has saved, and run torch's hooks as torch does.

        States that will be paged go from where they are to paged memory, one at a time: the device may lack the room.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        stays_paged = move_to_device and self.is_paged
        super().load_state_dict(state_dict, move_to_device and not stays_paged)
        drop_marks_of_copies(self)
        if stays_paged:
            repage_states(self)
            self._move_others()
        self.checks.num_checked = 0
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _move_others(self) -> None:
        """Move what bitsandbytes doesn't page to the devices of the parameters, as its own loading does."""
        for parameter, state in self.state.items():
            for key in (self.non_castable_tensor_keys | {COMPENSATION}) & state.keys():
                if not is_marked(state[key]):
                    state[key] = state[key].to(parameter.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy everything; torch's optimizers leave out attributes that bitsandbytes needs."""
        memo[id(self)] = copied = type(self).__new__(type(self))
        for name, value in vars(self).items():
            if name != "step":  # a scheduler's layer, which would step the original
                copied.__dict__[name] = value if name == "page_mng" else copy.deepcopy(value, memo)
        drop_marks_of_copies(copied)
        copied.checks.num_checked = 0
        return copied

    def _refuse(self) -> None:
        """Refuse, before a weight changes, what bitsandbytes would ignore or fail at."""
        name = type(self).__name__
        for index, group in enumerate(self.param_groups):
            reason = self.form.refusal(group)
            if reason:
                raise ValueError(f"{name}, parameter group {index}: {reason}.")
            refuse_sparse(name, group["params"])
            for parameter in group["params"]:
                if parameter not in self.state:
                    refuse_parameter(parameter, index)


@functools.cache
def guarded(cls: type[Any]) -> type[Any]:
    """Make a class of the same name that steps groups of the original optimizer, and refuses what it can't step.

    Args:
        cls: An optimizer class of bitsandbytes.
    """
    names = {"__qualname__": cls.__qualname__, "__module__": cls.__module__, "__doc__": cls.__doc__, "upstream": cls}
    return type(cls.__name__, (_Guarded, cls), names)


class _Checks(OwnHook):
    """Checks states that are new or were loaded or copied, and pages the latter again: before and after a step.

    Not in the step, which `Float32Step` runs for stand-ins of the parameters.
    """

    def __init__(self) -> None:
        self.num_checked = 0

    def __call__(self, optimizer: Any, *_: Any) -> None:
        if len(optimizer.state) != self.num_checked:
            check_states(optimizer)
            repage_states(optimizer)
            self.num_checked = len(optimizer.state)


def _plain(state: State, family: str) -> State:
    names = dict(zip(NUMBERED, MOMENTS[family], strict=False))
    kept = {names.get(key, key): value for key, value in state.items() if key in (*names, COMPENSATION)}
    return kept if family == "SGD" else {"step": torch.tensor(float(state["step"])), **kept}


def is_converted(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `to_bitsandbytes` or `guard` made it."""
    return isinstance(getattr(optimizer, "form", None), Form)


class _ResumeStates(Resume):
    """Loads states of any width with the widths that this optimizer has promised."""

    @override
    def restored(self, optimizer: Any, parameter: Tensor, state: State) -> State:
        saved = flat(state)
        bits = optimizer.state_widths.bits_of(parameter)
        if _has_width(saved, parameter, bits):
            return {key: value for key, value in saved.items() if key not in MOMENTS[self.family]}
        step, moments = moments_of(saved, self.family)
        made = _new_state(optimizer, parameter)
        made["step"] = step
        for name, key in zip(MOMENTS[self.family], NUMBERED, strict=False):
            if key in made:
                _write(made, key, moments[name].to(parameter.device))
        return made

    @override
    def refuse_group(self, group: Mapping[str, Any], index: int) -> None:
        reason = self.form.refusal(group)
        if reason:
            raise ValueError(f"`ckpt_path`, parameter group {index}: {reason}.")

    form: Form


def _has_width(state: State, parameter: Tensor, bits: int) -> bool:
    if NUMBERED[0] not in state:
        return False
    if bits == 32:
        return all(state[key].dtype is torch.float32 for key in NUMBERED if key in state)
    num_scales = -(-parameter.numel() // BLOCK_SIZE)
    pairs = [(state[key], state.get(key.replace("state", "absmax"))) for key in NUMBERED if key in state]
    return all(
        moment.dtype is torch.uint8
        and scales is not None
        and scales.numel() == num_scales * (moment.numel() // parameter.numel())
        for moment, scales in pairs
    )


def _new_state(optimizer: Any, parameter: Tensor) -> State:
    """A state as bitsandbytes makes it in a first step."""
    places = (
        (group, gindex, pindex)
        for gindex, group in enumerate(optimizer.param_groups)
        for pindex, other in enumerate(group["params"])
        if other is parameter
    )
    group, gindex, pindex = next(places)
    before = optimizer.state.pop(parameter, None)
    optimizer.init_state(group, parameter, gindex, pindex)
    made: State = optimizer.state.pop(parameter)
    if before is not None:
        optimizer.state[parameter] = before
    return made


def _write(state: State, key: str, values: Tensor) -> None:
    """Write a moment into a new state, rounded as bitsandbytes rounds it after a step if it has 8 bits."""
    moment = state[key]
    if moment.dtype is not torch.uint8:
        moment.copy_(values)
        return
    from bitsandbytes.functional import quantize_blockwise

    scales, table = (state[key.replace("state", name)] for name in ("absmax", "qmap"))
    stacked = scales.dim() == 2
    for part, scale, value in zip(
        *((moment, scales, values) if stacked else ([moment], [scales], [values])), strict=True
    ):
        codes, rounded = quantize_blockwise(value.float().contiguous(), code=table, blocksize=BLOCK_SIZE)
        part.copy_(codes)
        scale.copy_(rounded.absmax)


# --- converting -------------------------------------------------------------------------------------------------------

# Classes called Lion have flags under various names for variants that bitsandbytes does not compute.
_ANY_LION = Form(
    "Lion", EightBitForm({**TORCH_SWITCHES, "caution": False, "cautious": False, "decoupled_weight_decay": False})
)
_KNOWN = {
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "alpha",
    "t_alpha",
    "t_beta3",
    "momentum",
    "dampening",
    "foreach",
    "fused",
}


def to_bitsandbytes(
    optimizer: torch.optim.Optimizer,
    *,
    bits: int = 8,
    paged: bool = False,
    keep_32bit: Iterable[Tensor] = (),
    min_8bit_size: int = 4096,
    technique: str = "to_bitsandbytes",
) -> Any:
    """Build the bitsandbytes form of an optimizer over the same parameters.

    It accepts AdamW, Adam, SGD and RMSprop of `torch.optim`, classes called Lion if a trial shows that they step as
    Lion does, and the 32-bit optimizers of bitsandbytes. Groups keep their order, hyper-parameters and keys; what is
    changed in them later counts under the original's names. `foreach` and `fused` choose a kernel, not a formula, and
    have no effect. States go on, in their new width. The original is not changed.

    Args:
        optimizer: An optimizer.
        bits: 8, or 32 for 32-bit states (worth it only with `paged`).
        paged: States in CUDA unified memory, which moves to the host under pressure. bitsandbytes warns on the CPU,
            where this does nothing.
        keep_32bit: Parameters whose states stay 32-bit, typically `embedding_parameters(module)`.
        min_8bit_size: Parameters with fewer elements keep 32-bit states.
        technique: What checkpoints name as the way they were written.

    Returns:
        A `bitsandbytes.optim` optimizer.

    Raises:
        ValueError: If the class, a hyper-parameter or a parameter's dtype cannot be carried over.
    """
    if bits not in (8, 32):
        raise ValueError(f"`bits={bits}` must be 8 or 32.")
    form = _form_of(optimizer)
    _refuse_what_would_change(optimizer, form)
    if paged and not form.record.paged:
        raise ValueError(
            f"`paged=True`: bitsandbytes has no paged {form.stem}. Use paged=False or AdamW, Adam or Lion."
        )
    # `AdEMAMix32bit` of bitsandbytes 0.50 makes a state of half the size that its kernel writes to.
    width = "" if form.stem == "AdEMAMix" and bits == 32 else f"{bits}bit"
    # The quantization maps, and the tensors that importing bitsandbytes makes, must be real ones with values.
    with _disable_current_modes():
        import bitsandbytes

        cls = getattr(bitsandbytes.optim, f"{'Paged' if paged else ''}{form.stem}{width}")
        parameters = [{"params": list(group["params"])} for group in optimizer.param_groups]
        momentum = {"lr": 1.0, "momentum": 1e-3} if form.stem == "SGD" else {}  # required; groups have the real ones
        converted = guarded(cls)(parameters, min_8bit_size=min_8bit_size, **momentum)
    guard(converted, optimizer, form, _class_name(optimizer), technique, keep_32bit=keep_32bit)
    converted.defaults = dict(optimizer.defaults)
    converted.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    make_maps_fake(converted)
    if optimizer.state:
        converted.load_state_dict(optimizer.state_dict())
    return converted


def guard(
    converted: Any,
    original: torch.optim.Optimizer,
    form: Form,
    class_name: str,
    technique: str,
    options: Mapping[str, Any] | None = None,
    keep_32bit: Iterable[Tensor] = (),
) -> None:
    """Complete an optimizer of a `guarded` class.

    Args:
        converted: The optimizer, with bitsandbytes' own defaults.
        original: The one that it was made from.
        form: What bitsandbytes computes, and how groups say so.
        class_name: Class whose hyper-parameters the groups have.
        technique: What checkpoints name as the way they were written.
        options: Hyper-parameters that a checkpoint must not undo.
        keep_32bit: Parameters whose states stay 32-bit.
    """
    converted.upstream_defaults = dict(converted.defaults)
    converted.form = form
    converted.mng = _OnePositionTable(converted.mng)
    converted.state_widths = StateWidths(converted, keep_32bit)
    converted.checks = _Checks()
    converted.register_step_pre_hook(converted.checks)
    converted.register_step_post_hook(converted.checks)
    resume = _ResumeStates(form.family, class_name, technique, options)
    resume.form = form
    resume.attach(converted, original)


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    cls = type(optimizer)
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


def convertible(paged: bool = False) -> tuple[str, ...]:
    """Names of the classes that have an 8-bit form, or with `paged` a paged one."""
    forms = {cls.class_name: cls.eight_bit for cls in optimizer_classes().values() if cls.eight_bit is not None}
    return tuple(name for name, form in forms.items() if form.paged or not paged)


def _form_of(optimizer: torch.optim.Optimizer) -> Form:
    cls = type(optimizer)
    path = f"{cls.__module__}.{cls.__qualname__}"
    known = next((known for known in optimizer_classes().values() if known.path == path), None)
    if known is not None and known.package == "torch" and known.eight_bit is not None:
        form = Form(known.class_name, known.eight_bit)
    elif cls.__module__.startswith("bitsandbytes."):
        form = _form_of_bitsandbytes(optimizer)
    elif _is_unknown_lion(optimizer):
        form = _ANY_LION
    else:
        raise ValueError(
            f"`{cls.__module__}.{cls.__name__}` has no 8-bit form. Use torch.optim.AdamW, Adam, SGD (with momentum) or "
            "RMSprop, a class called Lion, or a 32-bit optimizer of bitsandbytes; subclasses may compute something "
            "else and are refused."
        )
    known_names = _KNOWN | set(form.record.required) | {"decoupled_weight_decay"}
    return replace(form, ignored=frozenset(optimizer.defaults) - known_names)


def _form_of_bitsandbytes(optimizer: Any) -> Form:
    name = type(optimizer).__name__
    stem = name.removeprefix("Paged").removesuffix("32bit")
    if optimizer.args.optim_bits == 8:
        raise ValueError(f"`{name}` has 8-bit states already; nothing is to be converted. Remove the conversion.")
    if stem not in convertible() or optimizer.args.max_unorm or optimizer.args.skip_zeros:
        raise ValueError(f"`{name}` has no 8-bit form with the same formula. Choose from {', '.join(convertible())}.")
    # bitsandbytes' own Adam also decouples weight decay, so that nothing changes.
    return Form("AdamW" if stem == "Adam" else stem, EightBitForm(paged=stem in convertible(paged=True)))


def _refuse_what_would_change(optimizer: torch.optim.Optimizer, form: Form) -> None:
    name = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        reason = form.refusal({**optimizer.defaults, **group})
        if reason:
            raise ValueError(f"{name}, parameter group {index}: {reason}.")
        for parameter in group["params"]:
            refuse_parameter(parameter, index)
        if _is_unknown_lion(optimizer) and not _steps_as_lion(optimizer, group):
            raise ValueError(
                f"{name}, parameter group {index}: `{type(optimizer).__module__}.{name}` computes something else than "
                "Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2), as it is configured here, and bitsandbytes "
                "would not. Turn off what differs (`decoupled_weight_decay` of lion-pytorch, cautious updates), or "
                "leave the conversion out."
            )


def _is_unknown_lion(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__ == "Lion" and not type(optimizer).__module__.startswith("bitsandbytes.")


@_disable_current_modes()  # in a trace, a trial has values all the same
def _steps_as_lion(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer steps as Lion does; of one that can't be tried, its name and its hyper-parameters tell."""
    trial = Trial(optimizer, group)
    found = trial.stepped()
    if found is None or "betas" not in group:
        return found is None
    (first, second), decay = group["betas"], 1 - TRIAL_RATE * group.get("weight_decay", 0.0)
    for number, (weight, result) in enumerate(zip(trial.start, found, strict=True)):
        expected, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
        for gradients in trial.gradients:
            gradient = gradients[number].double()
            expected = expected * decay - TRIAL_RATE * momentum.lerp(gradient, 1 - first).sign()
            momentum = momentum.lerp(gradient, 1 - second)
        if not torch.allclose(result.double(), expected, rtol=0, atol=1e-4 * TRIAL_RATE):
            return False
    return True


def refuse_parameter(parameter: Tensor, index: int) -> None:
    """Raise a `ValueError` if bitsandbytes would step a parameter in another dtype than its own, or not at all."""
    if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"Parameter group {index} holds a {parameter.dtype} parameter of shape {tuple(parameter.shape)}; "
            "bitsandbytes steps float32, float16 and bfloat16 only."
        )
    if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
        raise ValueError(
            f"Parameter group {index} is sharded (DTensor, FSDP2), which bitsandbytes cannot step. Use DDP, DeepSpeed "
            "or an unconverted optimizer."
        )
