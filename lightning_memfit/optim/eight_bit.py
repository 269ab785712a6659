"""`to_bitsandbytes`: convert an optimizer that a user built to its 8-bit or paged form, with all its settings.

bitsandbytes' formulas are those of torch for AdamW, Lion and SGD with momentum. It would silently ignore flags that it
doesn't have: they are refused when an optimizer is converted and whenever it steps. Groups keep the original's
hyper-parameters under the original's names, so that schedules and edits of them count.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_memfit.optim.optimizers import EightBitForm, OptimizerClass, optimizer_classes
from lightning_memfit.optim.paging import drop_false_marks, is_marked, paged_buffer
from lightning_memfit.optim.states import BLOCK_SIZE, MOMENTS, NUMBERED, Resume, State, StateDict, flat, moments_of
from lightning_memfit.optim.steps import copied_whole, refuse_sparse, refuse_wide, run_closure, step_below_hooks

# Written for bitsandbytes 0.50: `Optimizer8bit.get_config`, `get_state_buffer`, `init_state`, `update_step`,
# `name2qmap`, `args`, `mng` and the state keys `state1`, `state2`, `absmax1`, `absmax2`;
# `tests/numerics/optim/test_eight_bit.py` fails when these move.


def repage_states(optimizer: Any) -> None:
    """Page the states of a paged optimizer again where loading, moving or copying has made ordinary tensors of them.

    Those that bitsandbytes doesn't page, with under 1e5 elements, go to the device of their parameter.
    """
    optimizer = getattr(optimizer, "wrapped", optimizer)
    if not (isinstance(optimizer, _Guarded) and optimizer.is_paged):
        return
    drop_false_marks(optimizer)
    for parameter, state in optimizer.state.items():
        if parameter.device.type == "cpu":
            continue
        for key in optimizer.non_castable_tensor_keys & state.keys():
            value = state[key]
            if not is_marked(value):
                buffer = optimizer.get_state_buffer(parameter, value.dtype) if key in NUMBERED else value
                state[key] = buffer.copy_(value) if is_marked(buffer) else value.to(parameter.device)


def embedding_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Weights of all embeddings in a module. A head tied to an embedding is the same parameter."""
    owners = (owner for owner in module.modules() if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)))
    return [parameter for owner in owners for parameter in owner.parameters(recurse=False)]


def _refusal(cls: OptimizerClass, group: Mapping[str, Any]) -> str | None:
    """Reason why the hyper-parameters of a group of a class cannot be kept in its 8-bit form."""
    for name, value in (cls.eight_bit or EightBitForm()).required.items():
        of_decay = name == "decoupled_weight_decay" and not group.get("weight_decay")
        if name in group and group[name] != value and not of_decay:
            return f"bitsandbytes ignores `{name}={group[name]!r}`; it computes what {name}={value!r} means"
    if cls.class_name == "Adam" and group.get("weight_decay") and not group.get("decoupled_weight_decay", False):
        return (
            f"`weight_decay={group['weight_decay']}` is added to the gradient by torch's Adam but decoupled by "
            "bitsandbytes; use AdamW or weight_decay=0"
        )
    if cls.class_name == "SGD" and not group.get("momentum", True):
        return "SGD with `momentum=0` has no states that could be made smaller"
    if isinstance(group["lr"], Tensor):
        return "bitsandbytes takes no tensor as `lr`; pass a float"
    return None


_Upstream: Any = object
"""Stands for the class of bitsandbytes that follows in the order of bases."""


class _Guarded(_Upstream):  # type: ignore[misc]
    """What comes before a class of bitsandbytes: it reads groups of the original, and refuses what it can't step."""

    upstream: type[Any]
    """The class of bitsandbytes that steps."""
    original: OptimizerClass
    """The class whose groups are stepped."""
    keep_32bit: set[Tensor]
    """Parameters whose states stay 32-bit. bitsandbytes asks a table of the process, which others would see, too."""
    upstream_defaults: dict[str, Any]

    @override
    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        named, form = {**self.upstream_defaults, **group}, self.original.eight_bit
        if form is not None and form.betas:
            named["betas"] = tuple(named.pop(name) for name in form.betas)
        config: dict[str, Any] = super().get_config(gindex, pindex, named)
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
        if self.original.family == "SGD":
            # torch's SGD would start with new momenta where it finds none; of a number it makes an error.
            for state in saved["state"].values():
                state[MOMENTS["SGD"][0]] = self.args.optim_bits
        return saved

    @override
    def load_state_dict(self, state_dict: StateDict, move_to_device: bool = True) -> None:
        """Load what this optimizer or one of its family has saved, and run torch's hooks as torch does."""
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        stays_paged = move_to_device and self.is_paged  # directly: the device may lack the room
        super().load_state_dict(state_dict, move_to_device and not stays_paged)
        drop_false_marks(self)
        if stays_paged:
            repage_states(self)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copied_whole(self, memo, ("mng", "page_mng"))
        repage_states(copied)
        return copied

    def _refuse(self) -> None:
        """Refuse, before a weight changes, what bitsandbytes would ignore or fail at."""
        name = type(self).__name__
        for index, group in enumerate(self.param_groups):
            reason = _refusal(self.original, group)
            if reason:
                raise ValueError(f"{name}, parameter group {index}: {reason}.")
            refuse_sparse(name, group["params"])
            refuse_wide(name, (parameter for parameter in group["params"] if parameter not in self.state))


@functools.cache
def guarded(cls: type[Any]) -> type[Any]:
    """Make a class of the same name that steps groups of the original optimizer, and refuses what it can't step."""
    names = {"__qualname__": cls.__qualname__, "__module__": cls.__module__, "__doc__": cls.__doc__, "upstream": cls}
    return type(cls.__name__, (_Guarded, cls), names)


class _ResumeStates(Resume):
    """Loads states of any width with the widths that this optimizer has promised."""

    original: OptimizerClass

    @override
    def restored(self, optimizer: Any, parameter: Tensor, state: State) -> State:
        saved = flat(state)
        if not self.family:
            return saved
        made = _new_state(optimizer, parameter)
        kinds = {key: (value.dtype, value.shape) for key, value in made.items() if isinstance(value, Tensor)}
        if all(key in saved and (saved[key].dtype, saved[key].shape) == kind for key, kind in kinds.items()):
            return {key: value for key, value in saved.items() if key not in MOMENTS[self.family]}
        step, moments = moments_of(saved, self.family)
        made["step"] = step
        for name, key in zip(MOMENTS[self.family], NUMBERED, strict=False):
            if key in made:
                _write(made, key, moments[name].to(parameter.device))
        return made

    @override
    def loaded_group(self, saved: Mapping[str, Any], current: Mapping[str, Any], index: int) -> dict[str, Any]:
        group = super().loaded_group(saved, current, index)
        reason = _refusal(self.original, group)
        if reason:
            raise ValueError(f"`ckpt_path`, parameter group {index}: {reason}.")
        return group


def _new_state(optimizer: Any, parameter: Tensor) -> State:
    """A state as bitsandbytes makes it in a first step."""
    groups = enumerate(optimizer.param_groups)
    places = ((g, p) for g, group in groups for p, other in enumerate(group["params"]) if other is parameter)
    gindex, pindex = next(places)
    before = optimizer.state.pop(parameter, None)
    optimizer.init_state(optimizer.param_groups[gindex], parameter, gindex, pindex)
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

    It accepts AdamW, Adam and SGD of `torch.optim`, and the same and Lion of bitsandbytes in 32 bits. `foreach` and
    `fused` choose a kernel, not a formula, and have no effect. States go on, in their new width.

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
    original = _class_of(optimizer)
    assert original.eight_bit is not None
    for index, group in enumerate(optimizer.param_groups):
        reason = _refusal(original, {**optimizer.defaults, **group})
        if reason:
            raise ValueError(f"{type(optimizer).__name__}, parameter group {index}: {reason}.")
        refuse_wide("bitsandbytes", group["params"])
    stem = original.class_name
    if paged and not original.eight_bit.paged:
        raise ValueError(f"`paged=True`: bitsandbytes has no paged {stem}. Use paged=False or AdamW, Adam or Lion.")
    # The quantization maps, and the tensors that importing bitsandbytes makes, must be real ones with values.
    with _disable_current_modes():
        import bitsandbytes

        cls = getattr(bitsandbytes.optim, f"{'Paged' if paged else ''}{stem}{bits}bit")
        parameters = [{"params": list(group["params"])} for group in optimizer.param_groups]
        momentum = {"lr": 1.0, "momentum": 1e-3} if stem == "SGD" else {}  # required; groups have the real ones
        converted = guarded(cls)(parameters, min_8bit_size=min_8bit_size, **momentum)
    class_name = f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"
    guard(converted, optimizer, original, class_name, technique, keep_32bit)
    converted.defaults = dict(optimizer.defaults)
    converted.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    fake = next((p.data for group in parameters for p in group["params"] if isinstance(p.data, FakeTensor)), None)
    if fake is not None:  # steps under `FakeTensorMode` need fake maps
        converted.name2qmap = {name: fake.fake_mode.from_tensor(one) for name, one in converted.name2qmap.items()}
    if optimizer.state:
        converted.load_state_dict(optimizer.state_dict())
    return converted


def guard(
    converted: Any,
    optimizer: torch.optim.Optimizer,
    original: OptimizerClass,
    class_name: str,
    technique: str,
    keep_32bit: Iterable[Tensor] = (),
) -> None:
    """Complete an optimizer of a `guarded` class, with bitsandbytes' own defaults, that was made from another."""
    converted.upstream_defaults = dict(converted.defaults)
    converted.original = original
    converted.keep_32bit = set(keep_32bit)
    resume = _ResumeStates(original.family, class_name, technique)
    resume.original = original
    resume.attach(converted, optimizer)


def convertible(paged: bool = False) -> tuple[str, ...]:
    """Names of the classes that have an 8-bit form, or with `paged` a paged one."""
    forms = {cls.class_name: cls.eight_bit for cls in optimizer_classes().values() if cls.eight_bit is not None}
    return tuple(name for name, form in forms.items() if form.paged or not paged)


def _class_of(optimizer: Any) -> OptimizerClass:
    """The record of an optimizer's class, with an 8-bit form."""
    cls = type(optimizer)
    known = {one.path: one for one in optimizer_classes().values() if one.eight_bit is not None}
    path = f"{cls.__module__}.{cls.__qualname__}"
    if path.startswith("torch.") and path in known:
        return known[path]
    stem = cls.__name__.removeprefix("Paged").removesuffix("32bit")
    # What comes last would be lost.
    is_own = cls.__module__.startswith("bitsandbytes.") and not (optimizer.args.max_unorm or optimizer.args.skip_zeros)
    if not is_own or stem not in convertible() or optimizer.args.optim_bits == 8:
        raise ValueError(
            f"`{cls.__module__}.{cls.__name__}` has no 8-bit form, or is one. Use torch.optim.AdamW, Adam or SGD (with "
            "momentum), or one of these or Lion of bitsandbytes in 32 bits; other classes may compute something else."
        )
    same = next(one for one in known.values() if one.class_name == stem)
    # bitsandbytes' own Adam also decouples weight decay, so that nothing changes.
    path = f"{cls.__module__}.{'AdamW' if stem == 'Adam' else stem}"
    return OptimizerClass(path, {}, family=same.family, eight_bit=EightBitForm(paged=stem in convertible(paged=True)))
