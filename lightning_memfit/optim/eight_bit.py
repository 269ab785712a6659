"""`to_bitsandbytes`: convert an optimizer that a user built to its 8-bit or paged form, with all its settings.

bitsandbytes' formulas are those of torch for AdamW, Lion and SGD with momentum. It would silently ignore flags of the
original that it doesn't have; here they are refused, when an optimizer is converted and whenever it steps. Groups keep
the original's hyper-parameters under the original's names, so that schedules and edits of them count.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_memfit.optim.optimizers import EightBitForm, optimizer_classes
from lightning_memfit.optim.paging import drop_false_marks, is_marked, paged_buffer
from lightning_memfit.optim.states import (
    BLOCK_SIZE,
    MOMENTS,
    NUMBERED,
    Resume,
    State,
    StateDict,
    flat,
    moments_of,
)
from lightning_memfit.optim.steps import copied_whole, refuse_sparse, refuse_wide, run_closure, step_below_hooks

# --- states -----------------------------------------------------------------------------------------------------------

# Written for bitsandbytes 0.50: `Optimizer8bit.get_config`, `get_state_buffer`, `init_state`, `update_step`,
# `name2qmap`, `args`, `mng` and the state keys `state1`, `state2`, `absmax1`, `absmax2`;
# `tests/numerics/optim/test_eight_bit.py` fails when these move.


def repage_states(optimizer: Any) -> int:
    """Page the states of a paged optimizer again where loading, moving or copying has made ordinary tensors of them.

    Those that bitsandbytes doesn't page go to the device of their parameter.

    Returns:
        Number of state tensors moved to paged memory (0 on the CPU, where nothing is paged).
    """
    optimizer = getattr(optimizer, "wrapped", optimizer)
    if not (isinstance(optimizer, _Guarded) and optimizer.is_paged):
        return 0
    _drop_marks_of_copies(optimizer)
    moved = 0
    for parameter, state in optimizer.state.items():
        for key in NUMBERED:
            moment = state.get(key)
            if moment is None or parameter.device.type == "cpu" or is_marked(moment):
                continue
            buffer = optimizer.get_state_buffer(parameter, dtype=moment.dtype)
            if is_marked(buffer):
                buffer.copy_(moment)
                state[key] = buffer
                moved += 1
            elif moment.device != parameter.device:  # bitsandbytes pages nothing under 1e5 elements
                state[key] = moment.to(parameter.device)
    return moved


def _drop_marks_of_copies(optimizer: Any) -> None:
    """Take marks of paged memory off states that are copies in ordinary memory."""
    values = (value for state in optimizer.state.values() for value in state.values())
    drop_false_marks(value for value in values if isinstance(value, Tensor))


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

    @property
    def family(self) -> str:
        """Key of `states.MOMENTS`; "" if there is none."""
        stem = "Adam" if self.stem == "AdamW" else self.stem
        return stem if stem in MOMENTS else ""

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
        return None

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
    keep_32bit: WeakIdKeyDictionary
    """Parameters whose states stay 32-bit. bitsandbytes asks a table of the process, which others would see, too."""
    upstream_defaults: dict[str, Any]

    @override
    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        translated = {**self.upstream_defaults, **self.form.translate(group)}
        config: dict[str, Any] = super().get_config(gindex, pindex, translated)
        config["optim_bits"] = self._requested_bits(group["params"][pindex])
        return config

    def bits_of(self, parameter: Tensor) -> int:
        """Promised bits per state element of one parameter."""
        return 32 if parameter.numel() < self.args.min_8bit_size else self._requested_bits(parameter)

    def _requested_bits(self, parameter: Tensor) -> int:
        """Bits that are asked for, whatever the size; a user's `override_config` counts."""
        default = 32 if parameter in self.keep_32bit or not parameter.numel() else self.args.optim_bits
        return int(self.mng.pid2config.get(id(parameter), {}).get("optim_bits", default))

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
        make = functools.partial(super().get_state_buffer, like, dtype)
        is_paged = self.is_paged and p.device.type != "cpu"
        return paged_buffer(p.shape, dtype, p.device, make) if is_paged else make()

    @override
    def state_dict(self) -> StateDict:
        """Return bitsandbytes' states."""
        saved: StateDict = super().state_dict()
        if self.form.family == "SGD":
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
        _drop_marks_of_copies(self)
        if stays_paged:
            repage_states(self)
            for parameter, state in self.state.items():  # what isn't paged, as bitsandbytes' own loading does
                for key in self.non_castable_tensor_keys & state.keys():
                    if not is_marked(state[key]):
                        state[key] = state[key].to(parameter.device)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copied_whole(self, memo, ("mng", "page_mng"))
        copied.keep_32bit = _weakly(memo.get(id(parameter), parameter) for parameter in self.keep_32bit)
        repage_states(copied)
        return copied

    def _refuse(self) -> None:
        """Refuse, before a weight changes, what bitsandbytes would ignore or fail at."""
        name = type(self).__name__
        for index, group in enumerate(self.param_groups):
            reason = self.form.refusal(group)
            if reason:
                raise ValueError(f"{name}, parameter group {index}: {reason}.")
            refuse_sparse(name, group["params"])
            refuse_wide(name, (parameter for parameter in group["params"] if parameter not in self.state))


@functools.cache
def guarded(cls: type[Any]) -> type[Any]:
    """Make a class of the same name that steps groups of the original optimizer, and refuses what it can't step."""
    names = {"__qualname__": cls.__qualname__, "__module__": cls.__module__, "__doc__": cls.__doc__, "upstream": cls}
    return type(cls.__name__, (_Guarded, cls), names)


def _weakly(parameters: Iterable[Tensor]) -> WeakIdKeyDictionary:
    table = WeakIdKeyDictionary()
    for parameter in parameters:
        table[parameter] = True
    return table


class _ResumeStates(Resume):
    """Loads states of any width with the widths that this optimizer has promised."""

    form: Form

    @override
    def restored(self, optimizer: Any, parameter: Tensor, state: State) -> State:
        saved = flat(state)
        if not self.family:
            return saved
        bits = optimizer.bits_of(parameter)
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
    def loaded_group(self, saved: Mapping[str, Any], current: Mapping[str, Any], index: int) -> dict[str, Any]:
        group = super().loaded_group(saved, current, index)
        reason = self.form.refusal(group)
        if reason:
            raise ValueError(f"`ckpt_path`, parameter group {index}: {reason}.")
        return group


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
    codes, rounded = quantize_blockwise(values.float().contiguous(), code=table, blocksize=BLOCK_SIZE)
    moment.copy_(codes)
    scales.copy_(rounded.absmax)


# --- converting -------------------------------------------------------------------------------------------------------


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

    It accepts AdamW, Adam and SGD of `torch.optim`, and the same and Lion of bitsandbytes in 32 bits. Groups keep their
    order, hyper-parameters and keys; what is changed in them later counts under the original's names. `foreach` and
    `fused` choose a kernel, not a formula, and have no effect. States go on, in their new width. The original is not
    changed.

    Args:
        optimizer: An optimizer.
        bits: 8, or 32 for 32-bit states (worth it only with `paged`).
        paged: States in CUDA unified memory, which moves to the host under pressure. bitsandbytes warns on the CPU,
            where this does nothing.
        keep_32bit: Parameters whose states stay 32-bit, typically `embedding_parameters(module)`.
        min_8bit_size: Parameters with fewer elements keep 32-bit states.
        technique: What checkpoints name as the way they were written.

    Raises:
        ValueError: If the class, a hyper-parameter or a parameter's dtype cannot be carried over.
    """
    form = _form_of(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        reason = form.refusal({**optimizer.defaults, **group})
        if reason:
            raise ValueError(f"{type(optimizer).__name__}, parameter group {index}: {reason}.")
        refuse_wide("bitsandbytes", group["params"])
    if paged and not form.record.paged:
        raise ValueError(
            f"`paged=True`: bitsandbytes has no paged {form.stem}. Use paged=False or AdamW, Adam or Lion."
        )
    # The quantization maps, and the tensors that importing bitsandbytes makes, must be real ones with values.
    with _disable_current_modes():
        import bitsandbytes

        cls = getattr(bitsandbytes.optim, f"{'Paged' if paged else ''}{form.stem}{bits}bit")
        parameters = [{"params": list(group["params"])} for group in optimizer.param_groups]
        momentum = {"lr": 1.0, "momentum": 1e-3} if form.stem == "SGD" else {}  # required; groups have the real ones
        converted = guarded(cls)(parameters, min_8bit_size=min_8bit_size, **momentum)
    class_name = f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"
    guard(converted, optimizer, form, class_name, technique, keep_32bit)
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
    keep_32bit: Iterable[Tensor] = (),
) -> None:
    """Complete an optimizer of a `guarded` class, with bitsandbytes' own defaults, that was made from `original`."""
    converted.upstream_defaults = dict(converted.defaults)
    converted.form = form
    converted.keep_32bit = _weakly(keep_32bit)
    resume = _ResumeStates(form.family, class_name, technique)
    resume.form = form
    resume.attach(converted, original)


def convertible(paged: bool = False) -> tuple[str, ...]:
    """Names of the classes that have an 8-bit form, or with `paged` a paged one."""
    forms = {cls.class_name: cls.eight_bit for cls in optimizer_classes().values() if cls.eight_bit is not None}
    return tuple(name for name, form in forms.items() if form.paged or not paged)


def _form_of(optimizer: Any) -> Form:
    cls = type(optimizer)
    path = f"{cls.__module__}.{cls.__qualname__}"
    known = next((known for known in optimizer_classes().values() if known.path == path), None)
    if known is not None and known.package == "torch" and known.eight_bit is not None:
        return Form(known.class_name, known.eight_bit)
    stem = cls.__name__.removeprefix("Paged").removesuffix("32bit")
    # What comes last would be lost.
    is_own = cls.__module__.startswith("bitsandbytes.") and not (optimizer.args.max_unorm or optimizer.args.skip_zeros)
    if not is_own or stem not in convertible() or optimizer.args.optim_bits == 8:
        raise ValueError(
            f"`{cls.__module__}.{cls.__name__}` has no 8-bit form, or is one. Use torch.optim.AdamW, Adam or SGD (with "
            "momentum), or one of these or Lion of bitsandbytes in 32 bits; other classes may compute something else."
        )
    # bitsandbytes' own Adam also decouples weight decay, so that nothing changes.
    return Form("AdamW" if stem == "Adam" else stem, EightBitForm(paged=stem in convertible(paged=True)))
