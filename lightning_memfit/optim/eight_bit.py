"""`to_bitsandbytes`: convert an optimizer that a user built to its 8-bit or paged form, with all its settings.

bitsandbytes' formulas are those of torch for AdamW, Lion, SGD with momentum and RMSprop without momentum. It would
silently ignore flags of the original that it doesn't have; here they are refused. `StateWidths` and `check_states` make
sure that states have the promised width.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memfit.optim.optimizers import TORCH_SWITCHES, EightBitForm, optimizer_classes

# --- states -----------------------------------------------------------------------------------------------------------

# Written for bitsandbytes 0.49 and 0.50: `Optimizer8bit.get_config`, `get_state_buffer`, `name2qmap`, `args` and the
# state keys `state1`, `state2`, `absmax1`, `absmax2`;
# `tests/unit/optim/test_bitsandbytes_states.py` fails when these move.
_MOMENTS = ("state1", "state2")
_BLOCK_SIZE = 256  # elements that share one scale, fixed in bitsandbytes' kernels


class StateWidths:
    """Decides for each parameter whether its states have 8 or 32 bits.

    bitsandbytes asks a process-wide `GlobalOptimManager`, whose `register_parameters` stores overrides by (group,
    index), so that they leak into every other optimizer. This table belongs to one optimizer and is keyed by the
    parameter itself. An override that a user registered for the parameter (`override_config`) still counts.

    Args:
        optimizer: A bitsandbytes optimizer that has not stepped yet.
        keep_32bit: Parameters whose states stay 32-bit. They are held weakly and need not be in the optimizer.
    """

    def __init__(self, optimizer: Any, keep_32bit: Iterable[torch.Tensor] = ()) -> None:
        self.bits: int = optimizer.args.optim_bits
        self.min_8bit_size: int = optimizer.args.min_8bit_size
        self._overrides: dict[int, dict[str, Any]] = optimizer.mng.pid2config
        self._kept = WeakIdKeyDictionary()
        for parameter in keep_32bit:
            self._kept[parameter] = True
        upstream_config = type(optimizer).get_config
        # A cycle would keep the states alive until the garbage collector runs.
        reference = weakref.ref(optimizer)

        def get_config(gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = upstream_config(reference(), gindex, pindex, group)
            config["optim_bits"] = self._requested(group["params"][pindex])
            return config

        optimizer.get_config = get_config
        optimizer.state_widths = self

    def bits_of(self, parameter: torch.Tensor) -> int:
        """Promised bits per state element of one parameter."""
        return 32 if parameter.numel() < self.min_8bit_size else self._requested(parameter)

    def _requested(self, parameter: torch.Tensor) -> int:
        default = 32 if parameter in self._kept else self.bits
        return int(self._overrides.get(id(parameter), {}).get("optim_bits", default))


def check_states(optimizer: Any) -> None:
    """Check that existing states have the promised width, shape and number of scales, without reading values.

    Args:
        optimizer: An optimizer made by `to_bitsandbytes`, after a step.

    Raises:
        RuntimeError: If a state differs; the message names the parameter's shape, the state found and that promised.
    """
    for parameter, state in optimizer.state.items():
        bits = optimizer.state_widths.bits_of(parameter)
        expected = torch.uint8 if bits == 8 else torch.float32
        for key in _MOMENTS:
            if key not in state:
                continue
            moment = state[key]
            if moment.dtype is not expected or moment.numel() % parameter.numel():
                raise RuntimeError(_complaint(optimizer, parameter, key, moment, bits))
            scales = state.get(key.replace("state", "absmax"))
            num_scales = -(-parameter.numel() // _BLOCK_SIZE) * (moment.numel() // parameter.numel())
            if bits == 8 and (scales is None or scales.numel() != num_scales):
                raise RuntimeError(_complaint(optimizer, parameter, key, scales, bits))


def _complaint(optimizer: Any, parameter: torch.Tensor, key: str, found: torch.Tensor | None, bits: int) -> str:
    what = "nothing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
    return (
        f"{type(optimizer).__name__} was to keep {bits}-bit states for a parameter of shape {tuple(parameter.shape)}, "
        f"but its {key!r} holds {what}. Another library changed bitsandbytes' settings, or a checkpoint with other "
        "states was loaded; use the settings the checkpoint was written with, or start from its weights only."
    )


def repage_states(optimizer: Any) -> int:
    """Move the states of a paged optimizer back to paged memory after `load_state_dict`, which makes ordinary tensors.

    Returns:
        Number of state tensors moved (0 on the CPU, where nothing is paged).
    """
    moved = 0
    for parameter, key, moment in list(_unpaged(optimizer)):
        buffer = optimizer.get_state_buffer(parameter, dtype=moment.dtype)
        if not getattr(buffer, "is_paged", False):
            continue  # bitsandbytes pages nothing under 1e5 elements
        buffer.copy_(moment)
        optimizer.state[parameter][key] = buffer
        moved += 1
    return moved


def _unpaged(optimizer: Any) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    if not optimizer.is_paged:
        return
    for parameter, state in optimizer.state.items():
        for key in _MOMENTS:
            moment = state.get(key)
            # AdEMAMix stacks two moments in one tensor, for which it makes a buffer of its own.
            if moment is None or parameter.device.type == "cpu" or moment.shape != parameter.shape:
                continue
            if not getattr(moment, "is_paged", False):
                yield parameter, key, moment


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


# --- converting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The bitsandbytes class that an optimizer is converted to."""

    stem: str
    """Class name in `bitsandbytes.optim` without `Paged` and `8bit`."""
    record: EightBitForm

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        """Reason why this group's hyper-parameters cannot be kept."""
        for name, value in self.record.required.items():
            if name in group and group[name] != value:
                return f"bitsandbytes ignores `{name}={group[name]!r}`; it computes what {name}={value!r} means"
        if self.stem == "Adam" and group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            return (
                f"`weight_decay={group['weight_decay']}` is added to the gradient by torch's Adam but decoupled by "
                "bitsandbytes; use AdamW or weight_decay=0"
            )
        if self.stem == "SGD" and not group.get("momentum", True):
            return "SGD with `momentum=0` has no states that could be made smaller"
        if isinstance(group["lr"], torch.Tensor):
            return "bitsandbytes takes no tensor as `lr`; pass a float"
        return None

    def translate(self, hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Hyper-parameters in the names that bitsandbytes' groups use."""
        betas = self.record.betas
        gone = {*self.record.required, *betas, "foreach", "fused", "decoupled_weight_decay"}
        kept = {name: value for name, value in hyper_parameters.items() if name not in gone}
        if betas:
            kept["betas"] = tuple(hyper_parameters[name] for name in betas)
        return kept


# Classes called Lion have flags under various names for variants that bitsandbytes does not compute.
_ANY_LION = _Form(
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
    keep_32bit: Iterable[torch.Tensor] = (),
    min_8bit_size: int = 4096,
) -> Any:
    """Build the bitsandbytes form of an optimizer over the same parameters.

    It accepts AdamW, Adam, SGD and RMSprop of `torch.optim`, any class called Lion, and the 32-bit optimizers of
    bitsandbytes. Groups keep their order, hyper-parameters (including a learning rate that a schedule has changed) and
    extra keys. `foreach` and `fused` choose a kernel, not a formula, and are dropped. The original is not changed.

    Args:
        optimizer: An optimizer that has not stepped.
        bits: 8, or 32 for 32-bit states (worth it only with `paged`).
        paged: States in CUDA unified memory, which moves to the host under pressure. bitsandbytes warns on the CPU,
            where this does nothing.
        keep_32bit: Parameters whose states stay 32-bit, typically `embedding_parameters(module)`.
        min_8bit_size: Parameters with fewer elements keep 32-bit states.

    Returns:
        A `bitsandbytes.optim` optimizer without states.

    Raises:
        ValueError: If the class, a hyper-parameter, a parameter's dtype or an existing state cannot be carried over.
    """
    if bits not in (8, 32):
        raise ValueError(f"`bits={bits}` must be 8 or 32.")
    form = _form_of(optimizer)
    _refuse_what_would_change(optimizer, form)
    if paged and not form.record.paged:
        raise ValueError(
            f"`paged=True`: bitsandbytes has no paged {form.stem}. Use paged=False or AdamW, Adam or Lion."
        )
    groups = [form.translate(group) for group in optimizer.param_groups]
    defaults = form.translate({**optimizer.param_groups[0], **optimizer.defaults, "params": None})
    # The quantization maps, and the tensors that importing bitsandbytes makes, must be real ones with values.
    with _disable_current_modes():
        import bitsandbytes

        cls = getattr(bitsandbytes.optim, f"{'Paged' if paged else ''}{form.stem}{bits}bit")
        converted = cls(groups, min_8bit_size=min_8bit_size, **_constructor_arguments(form, optimizer))
    converted.defaults.update({name: defaults[name] for name in converted.defaults if name in defaults})
    make_maps_fake(converted)
    StateWidths(converted, keep_32bit)
    return converted


def _constructor_arguments(form: _Form, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Arguments that the constructor requires; the groups carry the real values."""
    if form.stem == "SGD":
        group = optimizer.param_groups[0]
        return {"lr": float(group["lr"]), "momentum": group.get("momentum") or group["betas"][0]}
    return {}


def convertible(paged: bool = False) -> tuple[str, ...]:
    """Names of the classes that have an 8-bit form, or with `paged` a paged one."""
    forms = {cls.class_name: cls.eight_bit for cls in optimizer_classes().values() if cls.eight_bit is not None}
    return tuple(name for name, form in forms.items() if form.paged or not paged)


def _form_of(optimizer: torch.optim.Optimizer) -> _Form:
    cls = type(optimizer)
    path = f"{cls.__module__}.{cls.__qualname__}"
    known = next((known for known in optimizer_classes().values() if known.path == path), None)
    if known is not None and known.package == "torch" and known.eight_bit is not None:
        return _Form(known.class_name, known.eight_bit)
    if cls.__module__.startswith("bitsandbytes."):
        return _form_of_bitsandbytes(optimizer)
    if cls.__name__ == "Lion":
        return _ANY_LION
    raise ValueError(
        f"`{cls.__module__}.{cls.__name__}` has no 8-bit form. Use torch.optim.AdamW, Adam, SGD (with momentum) or "
        "RMSprop, a class called Lion, or a 32-bit optimizer of bitsandbytes; subclasses may compute something else "
        "and are refused."
    )


def _form_of_bitsandbytes(optimizer: Any) -> _Form:
    name = type(optimizer).__name__
    stem = name.removeprefix("Paged").removesuffix("32bit")
    if optimizer.args.optim_bits == 8:
        raise ValueError(f"`{name}` has 8-bit states already; nothing is to be converted. Remove the conversion.")
    if stem not in convertible() or optimizer.args.max_unorm or optimizer.args.skip_zeros:
        raise ValueError(f"`{name}` has no 8-bit form with the same formula. Choose from {', '.join(convertible())}.")
    # bitsandbytes' own Adam also decouples weight decay, so that nothing changes.
    return _Form("AdamW" if stem == "Adam" else stem, EightBitForm(paged=stem in convertible(paged=True)))


def _refuse_what_would_change(optimizer: torch.optim.Optimizer, form: _Form) -> None:
    name = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(
            f"`optimizer` ({name}) has stepped or was loaded already; its 32-bit states are not converted. Convert it "
            "before the first step and before loading a checkpoint."
        )
    unknown = set(optimizer.defaults) - _KNOWN - set(form.record.required) - {"decoupled_weight_decay"}
    unknown = {key for key in unknown if optimizer.defaults[key]}
    if unknown:
        raise ValueError(
            f"{name}: bitsandbytes has no counterpart of {', '.join(f'`{key}`' for key in sorted(unknown))}."
        )
    for index, group in enumerate(optimizer.param_groups):
        reason = form.refusal(group)
        if reason:
            raise ValueError(f"{name}, parameter group {index}: {reason}.")
        for parameter in group["params"]:
            _refuse_parameter(parameter, index)


def _refuse_parameter(parameter: torch.Tensor, index: int) -> None:
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
