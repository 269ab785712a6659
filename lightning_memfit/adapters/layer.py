"""`FrozenLinear`: what a linear layer becomes, in place, when its weight is frozen: in codes, with an adapter, or both.

The layer stays the object that it was, with its class as a base, its names, hooks and places in the module. Only its
class changes, as with torch's parametrizations. Whoever reads `layer.weight` gets a `StandingWeight`: it looks like the
weight, and computes with what the layer computes with, the dequantized weight plus the adapter's product. Models that
cast to `weight.dtype`, that pass `weight` to an operator themselves, and torch's fast paths are served this way.

`state_dict()` keeps frozen weights and adapters apart, as who puts it back, averages it or writes into it needs. Only a
`save_pretrained` gets the weights merged: what it writes is read by a model that knows no adapters.
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_memfit.adapters.quantized import Codes
from lightning_memfit.memory.conversion import StaysFloat32

NAME = "default"
"""Name of the adapter; peft's default, so that names in checkpoints are those of peft."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the `Conv1D` of transformers: a linear layer whose weight is `(in, out)`."""
    own = type(module).__mro__[2] if isinstance(module, FrozenLinear) else type(module)
    return own.__name__ == "Conv1D" and own.__module__ == "transformers.pytorch_utils"


class Factor(StaysFloat32):
    """One of an adapter's two weights.

    It is in float32 whatever the precision of the frozen weights, and computes in that of its input: most updates of
    fine-tuning are smaller than what bfloat16 can add to a weight (Micikevicius et al., 2018, arXiv 1710.03740).

    No `nn.Linear`, as code that goes over a module's linear layers, for a penalty or to initialize them, means those
    that the module's author made.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        """Begin with the random weight that a linear layer without bias begins with."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Apply the weight to `(..., in)`, in the precision of the input."""
        return F.linear(input, self.weight.to(input.dtype))


class FrozenLinear(nn.Module):
    """What a linear layer becomes; stands before the layer's own class among the bases.

    `lora_A`, `lora_B`, `lora_dropout` and `codes` are None where the layer has no adapter or isn't quantized. The
    original of a quantized weight waits in `waiting`, unregistered.
    """

    lora_A: nn.ModuleDict | None
    lora_B: nn.ModuleDict | None
    lora_dropout: nn.Module | None
    codes: Codes | None
    bias: Tensor | None
    lora_scale: float
    waiting: nn.Parameter | None

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to `(..., in)`."""
        if not _watched:
            return self._compute(input)
        with reading():
            return self._compute(input)

    def _compute(self, input: Tensor) -> Tensor:
        raw = self._parameters["weight"]
        if self.codes is not None:
            output = self.codes.product(input, self.bias)
        elif is_conv1d(self):
            assert raw is not None
            flat = input.reshape(-1, input.shape[-1])
            output = flat @ raw if self.bias is None else torch.addmm(self.bias, flat, raw)
            output = output.view(*input.shape[:-1], output.shape[-1])
        else:
            assert raw is not None
            output = F.linear(input, raw, self.bias)
        if self.lora_A is None or self.lora_B is None or self.lora_dropout is None:
            return output
        inner, outer = self.lora_A[NAME], self.lora_B[NAME]
        change: Tensor = outer(inner(self.lora_dropout(input))) * self.lora_scale
        return output + change.to(output.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight as it acts: quantized, and with the adapter."""
        return StandingWeight(self)

    @property
    def raw(self) -> nn.Parameter:
        """The frozen weight itself; that of a quantized layer is where it waits."""
        weight = self._parameters["weight"] if self.waiting is None else self.waiting
        assert isinstance(weight, nn.Parameter)
        return weight

    def effective_weight(self) -> Tensor:
        """The weight in the layer's own layout, differentiable with respect to the adapter."""
        with torch.autocast(self.like.device.type, enabled=False), reading():
            weight: Tensor = self.raw if self.codes is None else self.codes.dequantize(self.like.dtype)
            if self.codes is not None and is_conv1d(self):
                weight = weight.t()
            if self.lora_A is None or self.lora_B is None:
                return weight
            dtype = torch.promote_types(weight.dtype, torch.float32)
            first, second = self.factors()
            product = self.lora_scale * (second.to(dtype) @ first.to(dtype))
            return weight + (product.t() if is_conv1d(self) else product).to(weight.dtype)

    @override
    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return frozen weight and adapter apart; merged, and in host memory, where `save_pretrained` asks for it."""
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if _is_saved_as_pretrained():
            for name in [name for name in state if name.startswith((f"{prefix}lora_A.", f"{prefix}lora_B."))]:
                del state[name]
            state[f"{prefix}weight"] = self.merged_weight()
        else:
            _warn_of_parts(state)
        return state

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The weight that the layer has after the run, in host memory: the original with the adapter's product."""
        weight = self.raw.detach().to(self.like.dtype)
        if self.lora_A is not None:
            weight = sum_with_product(weight, *self.factors(), self.lora_scale, is_conv1d(self)).to(weight.dtype)
        return weight.cpu()

    def factors(self) -> tuple[Tensor, Tensor]:
        """The inner and the outer weight of the adapter."""
        assert self.lora_A is not None
        assert self.lora_B is not None
        return cast(Factor, self.lora_A[NAME]).weight, cast(Factor, self.lora_B[NAME]).weight

    @property
    def like(self) -> Tensor:
        """A tensor of the weight's dtype and device."""
        return self.raw if self.codes is None else self.codes.like

    def put(self, weight: Tensor) -> None:
        """Replace the frozen weight's values; codes are made anew."""
        with torch.no_grad():
            self.raw.copy_(weight)
            if self.codes is not None:
                source = self.raw.to(self.codes.like.device)
                self.codes.store(source.t() if is_conv1d(self) else source)


def is_fake_tensor(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def sum_with_product(weight: Tensor, first: Tensor, second: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return `weight + scale * second @ first` in at least float32; on the host where the device has no room.

    A weight that this would not change is returned itself.

    Args:
        weight: `(out, in)`, or `(in, out)` where `transposed`.
        first: The adapter's inner weight, `(rank, in)`.
        second: The adapter's outer weight, `(out, rank)`.
        scale: Scale of the adapter.
        transposed: Whether the weight is that of a `Conv1D`.
    """
    if is_fake_tensor(second) or not bool(second.cpu().any()):
        return weight  # keeps bits as they are, where 0 would be added to -0
    dtype = torch.promote_types(weight.dtype, torch.float32)

    def sum_on(device: torch.device) -> Tensor:
        change = scale * (second.to(device, dtype) @ first.to(device, dtype))
        return weight.to(device, dtype) + (change.t() if transposed else change)

    try:
        return sum_on(weight.device)
    except torch.OutOfMemoryError:  # after an error for memory, whose traceback still holds what filled it
        return sum_on(torch.device("cpu"))


_ADDED = ("lora_A", "lora_B", "lora_dropout", "codes")


# --- who asks for a state dictionary ----------------------------------------------------------------------------------

_LIGHTNING = ("lightning", "pytorch_lightning")
_TECHNIQUES = f"{__name__.partition('.')[0]}.techniques."
_QUIET = ("torch", *_LIGHTNING, __name__.partition(".")[0])
"""Packages that put back themselves what they read, or save it in a checkpoint from which Lora goes on."""
_warned_of: Callable[[], Any] = int  # refers to the last one


def _callers() -> Iterator[Any]:
    """Frames above those of this file and of `nn.Module`, from the nearest."""
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, nn.Module.__module__):
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_saved_as_pretrained() -> bool:
    """Whether a `save_pretrained` is running (transformers, diffusers, huggingface_hub), or safetensors saves a model.

    Told by frames, not by a layer around the method, which copies of a model would lack. A checkpoint of Lightning's
    that is saved on the way is one like others.
    """
    for frame in _callers():
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "save_pretrained" or module == "safetensors.torch":
            return True
        if module.partition(".")[0] in _LIGHTNING or module.startswith(_TECHNIQUES):
            return False
    return False


def _warn_of_parts(state: Any) -> None:
    """Tell code of the user's, once for each dictionary, that what was learned is not in the weights."""
    global _warned_of
    frame = next((one for one in _callers() if one.f_code.co_name != "state_dict"), None)  # an override calls this
    package = "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if frame is None or package in _QUIET or _warned_of() is state:
        return
    _warned_of = weakref.ref(state) if isinstance(state, OrderedDict) else int
    warnings.warn_explicit(
        "Lora: this state dictionary has adapters apart from the frozen weights, and no quantized weights. It can be "
        "loaded again in this run, but not into the plain module. To keep what was learned, use `save_pretrained` or "
        "`trainer.save_checkpoint`, or read the state dictionary after the run, when adapters are merged.",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


class FrozenTorchLinear(FrozenLinear, nn.Linear):  # type: ignore[misc, override]
    """A frozen `nn.Linear`."""


@cache
def _frozen_conv1d() -> type:
    """Make the class for transformers' layer where it is needed: transformers is imported then."""
    from transformers.pytorch_utils import Conv1D

    return type("FrozenConv1D", (FrozenLinear, Conv1D), {"__module__": __name__, "__doc__": "A frozen `Conv1D`."})


def __getattr__(name: str) -> Any:
    """Let other processes unpickle the class."""
    if name == "FrozenConv1D":
        return _frozen_conv1d()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def freeze(layer: nn.Module) -> FrozenLinear:
    """Turn an `nn.Linear` or a `Conv1D` into a `FrozenLinear`, in place; a layer that is one stays as it is."""
    if isinstance(layer, FrozenLinear):
        return layer
    layer.__class__ = _frozen_conv1d() if is_conv1d(layer) else FrozenTorchLinear
    for name in _ADDED:
        layer._modules[name] = None
    layer.lora_scale, layer.waiting = 1.0, None  # type: ignore[assignment]
    assert isinstance(layer, FrozenLinear)
    return layer


def thaw(layer: FrozenLinear) -> None:
    """Make a layer what it was, once it has neither codes nor an adapter."""
    if any(layer._modules[name] is not None for name in _ADDED):
        return
    for name in _ADDED:
        del layer._modules[name]
    del layer.lora_scale, layer.waiting
    layer.__class__ = type(layer).__mro__[2]


def quantize(layer: nn.Module, bits: int) -> FrozenLinear:
    """Replace a layer's weight by codes, in place. The original waits in `waiting`."""
    original = layer.raw if isinstance(layer, FrozenLinear) else layer._parameters["weight"]
    assert original is not None
    with torch.no_grad():  # before the layer changes, in case the weight can't be quantized
        codes = Codes(original.t() if is_conv1d(layer) else original, bits)
    frozen = freeze(layer)
    frozen._modules["codes"] = codes
    frozen._parameters["weight"] = None
    object.__setattr__(frozen, "waiting", original)  # unregistered: no part of the module while it waits
    return frozen


def dequantize(layer: FrozenLinear) -> None:
    """Give a layer its original weight again."""
    assert layer.waiting is not None
    layer._parameters["weight"] = layer.waiting
    object.__setattr__(layer, "waiting", None)
    layer._modules["codes"] = None
    thaw(layer)


def add_adapter(layer: nn.Module, rank: int, scale: float, dropout: float) -> FrozenLinear:
    """Give a layer an adapter that begins as zero (Hu et al., 2021, arXiv 2106.09685), in place."""
    frozen = freeze(layer)
    rows, columns = frozen.raw.shape
    outputs, inputs = (columns, rows) if is_conv1d(frozen) else (rows, columns)
    device = frozen.like.device
    inner, outer = Factor(inputs, rank, device), Factor(rank, outputs, device)
    nn.init.zeros_(outer.weight)
    frozen._modules["lora_A"] = nn.ModuleDict({NAME: inner})
    frozen._modules["lora_B"] = nn.ModuleDict({NAME: outer})
    frozen._modules["lora_dropout"] = nn.Dropout(dropout) if dropout else nn.Identity()
    frozen.lora_scale = scale
    frozen.train(layer.training)
    return frozen


def share_adapter(layer: nn.Module, other: FrozenLinear) -> FrozenLinear:
    """Give a layer the adapter of another, with which it has its weight in common."""
    frozen = freeze(layer)
    for name in ("lora_A", "lora_B", "lora_dropout"):
        frozen._modules[name] = other._modules[name]
    frozen.lora_scale = other.lora_scale
    return frozen


def drop_adapter(layer: FrozenLinear) -> None:
    """Take a layer's adapter away, without adding it to the weight."""
    for name in ("lora_A", "lora_B", "lora_dropout"):
        layer._modules[name] = None
    thaw(layer)


_depth = 0
_watched = 0


def watch_layers(change: int) -> None:
    """Make layers tell when they run, as often as this is called with 1 and until it is called with -1 as often.

    Not by hooks: what replaces a layer's `forward`, as ChunkedLoss does with that of a head, runs it without them.
    """
    global _watched
    _watched += change


@contextmanager
def reading() -> Iterator[None]:
    """Within this context frozen weights are read for their layer, which is no use of them beside it."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_reading() -> bool:
    """Whether a layer that is watched, or a `StandingWeight`, is just computing with the weights themselves."""
    return _depth > 0


class StandingWeight(Tensor):
    """What reading the weight of a `FrozenLinear` gives: it looks like the weight, and is computed when it is used.

    Writing to it is refused, as nothing would keep what is written.
    """

    layer: FrozenLinear
    detached: bool

    @staticmethod
    def __new__(cls, layer: FrozenLinear, detached: bool = False) -> StandingWeight:
        """Stand for a layer's weight; `detached` from autograd if wished."""
        like, trained = layer.like, layer.lora_A is not None and not detached
        standing: StandingWeight = Tensor._make_wrapper_subclass(
            cls, layer.raw.shape, dtype=like.dtype, device=like.device, requires_grad=trained
        )
        standing.layer, standing.detached = layer, detached
        return standing

    def __init__(self, layer: FrozenLinear, detached: bool = False) -> None:
        """Take the same arguments."""

    def value(self) -> Tensor:
        """The weight as an ordinary tensor."""
        value = self.layer.effective_weight()
        return value.detach() if self.detached else value

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if isinstance(first, StandingWeight):
            if func in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _DETACHING:
                return StandingWeight(first.layer, detached=True)
            if func is Tensor.__deepcopy__:
                return first.value().detach().clone()
            if _writes(func):
                raise _lost(func, first)
        if isinstance(kwargs.get("out"), StandingWeight):
            raise _lost(func, kwargs["out"])

        def replaced(value: Any) -> Any:
            return value.value() if isinstance(value, StandingWeight) else value

        return func(*tree_map(replaced, args), **tree_map(replaced, kwargs))

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute where nothing above has seen the operator, as in code that turns `__torch_function__` off."""

        def replaced(value: Any) -> Any:
            return value.value() if isinstance(value, StandingWeight) else value

        return func(*tree_map(replaced, args), **tree_map(replaced, kwargs or {}))


class UnlistedWeight(Tensor):
    """Stands, in steps that are watched, among a module's parameters for one that is quantized and therefore none.

    Code that goes over `parameters()` would leave quantized weights out without a word. It may look at this one, whose
    use is refused.
    """

    dotted: str

    @staticmethod
    def __new__(cls, layer: FrozenLinear, name: str) -> UnlistedWeight:
        """Stand for a layer's quantized weight, of this dotted name."""
        like = layer.like
        unlisted: UnlistedWeight = Tensor._make_wrapper_subclass(
            cls, layer.raw.shape, dtype=like.dtype, device=like.device
        )
        unlisted.dotted = name
        return unlisted

    def __init__(self, layer: FrozenLinear, name: str) -> None:
        """Take the same arguments."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _METADATA and func not in _COUNTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _FREEZING:  # going over a module to freeze or unfreeze it has never reached quantized weights
            return args[0]
        raise _left_out(func, (args, kwargs))

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse where nothing above has seen the operator, as in code that turns `__torch_function__` off."""
        raise _left_out(func, (args, kwargs))


def _left_out(func: Any, arguments: Any) -> ValueError:
    name = next(leaf.dotted for leaf in tree_leaves(arguments) if isinstance(leaf, UnlistedWeight))
    return ValueError(
        f"QuantizedWeights: this step goes over parameters and uses {name} ({getattr(func, '__name__', func)}), which "
        "is quantized and no parameter: what it computes would leave the weight out. Read the layer's `weight` "
        "instead, or leave the layer out of `target_modules`."
    )


_GETTERS = """
    dtype shape device layout ndim itemsize nbytes requires_grad is_leaf names grad is_cuda is_cpu is_meta is_sparse
    is_quantized is_mkldnn is_mps is_xpu is_nested is_sparse_csr grad_fn output_nr retains_grad
"""
_METHODS = """
    size stride dim numel nelement element_size is_floating_point is_complex is_contiguous __len__ __hash__ get_device
    ndimension is_signed is_inference has_names
"""
_METADATA = {getattr(Tensor, name).__get__ for name in _GETTERS.split() if hasattr(Tensor, name)}
_METADATA |= {getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)}
_METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel}
_COUNTS = {Tensor.numel, Tensor.nelement, torch.numel, Tensor.nbytes.__get__}  # type: ignore[attr-defined]
_FREEZING = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_DETACHING = {Tensor.data.__get__, Tensor.detach, torch.detach}  # type: ignore[attr-defined]
_POINTERS = {"data_ptr", "untyped_storage", "storage", "_typed_storage", "register_hook", "retain_grad"}


def _lost(func: Callable[..., Any], weight: StandingWeight) -> RuntimeError:
    return RuntimeError(
        f"`{getattr(func, '__name__', func)}` on the weight of a {type(weight.layer).__mro__[2].__name__} that is "
        "frozen below an adapter or quantized: nothing would keep what is written. Change it before the run, or leave "
        "the layer out of `target_modules`."
    )


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument in place, or hands out its memory."""
    name = getattr(func, "__name__", "")
    if name == "__set__" or name in _POINTERS:
        return True
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")
