"""Fakes in place of a module's tensors: they have shape, dtype and stride but no memory.

Written for torch 2.11-2.13 (`torch._subclasses.fake_tensor`) and transformers 5 (`is_fake_tensor`);
`tests/truth/profile/test_fake.py` fails when either moves.
"""

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from lightning_memfit.memory.conversion import default_dtype, not_converted
from lightning_memfit.profile.replaced import replaced

_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))

_NOT_FOLLOWED = (type, ModuleType, FrameType, CodeType, BuiltinFunctionType, weakref.ref)


def tensors_in(value: Any, left_out: Iterable[object] = ()) -> list[torch.Tensor]:
    """Every tensor that an object holds, in its order, each once: in containers, objects and what functions enclose."""
    found: list[torch.Tensor] = []
    seen = {id(one): one for one in left_out}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) in _ATOMS or id(one) in seen or isinstance(one, _NOT_FOLLOWED):
            continue
        seen[id(one)] = one  # kept, as numbers of objects that are gone are given to others
        if isinstance(one, torch.Tensor):
            found.append(one)
        waiting += reversed(_held(one))
    return found


def _held(value: Any) -> list[Any]:
    """What an object refers to, in its order."""
    if isinstance(value, torch.Tensor):
        hooks = ((registered or {}).values() for registered in _hooks(value))
        return [vars(value), *(hook for group in hooks for hook in group)]
    if isinstance(value, FunctionType):  # not its globals
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, value.__dict__]
    if type(value) in (list, tuple):  # which Python's collector visits from the end
        return list(value)
    return gc.get_referents(value)


def _hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The user's hooks on a tensor's gradient, by kind."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def must_be_strided(tensor: torch.Tensor, *_: object) -> None:
    """Refuse a tensor of another layout, for which there is no fake of the same memory."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"fake tensors of layout {tensor.layout} don't tell what memory they hold")


def turn_fake(
    value: Any,
    fake_mode: FakeTensorMode,
    note: Callable[[torch.Tensor, torch.Tensor], object] = must_be_strided,
    dtype: torch.dtype | None = None,
    left_out: Iterable[object] = (),
) -> None:
    """Turn the real and meta tensors of an object into fakes where they are, for all who refer to one.

    There is no way back: this is for a process that is thrown away.

    `note` is called with every tensor that is no parameter, as it was, and the fake. Floating fakes have `dtype`, as
    after `module.to(dtype)`. Objects that are left out aren't looked into.
    """
    modules = list(value.modules()) if isinstance(value, torch.nn.Module) else []
    kept = not_converted(value, dtype) if dtype is not None and modules else []
    as_they_are = {id(tensor) for tensor in kept}
    for tensor in tensors_in(value, left_out):
        if not isinstance(tensor, FakeTensor) and not is_lazy(tensor):
            converted = dtype if id(tensor) not in as_they_are and tensor.is_floating_point() else None
            _turn(tensor, fake_mode, converted or tensor.dtype, note)
    for child in modules:
        # `.to()`, `.half()` and `.cpu()` would swap real data pointers, which fakes don't have.
        object.__setattr__(child, "_apply", _Unchanged(child))


def _turn(tensor: torch.Tensor, fake_mode: FakeTensorMode, dtype: torch.dtype, note: Any) -> None:
    with fake_mode, torch.no_grad():
        if tensor.layout is torch.strided:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
        else:  # of its shape alone: see `must_be_strided`
            fake = torch.empty(tensor.size(), dtype=dtype, device="cpu")
    real = _exchange(tensor, fake)
    _kept_real.append(real)  # memory of a device is not this process's to free
    if not isinstance(tensor, torch.nn.Parameter):
        note(real, tensor)


def _exchange(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Put another tensor into the place of one, hooks on its gradient included; return what was there."""
    if isinstance(tensor, torch.nn.Parameter):
        other = torch.nn.Parameter(other, requires_grad=tensor.requires_grad)
    elif tensor.is_leaf:
        other.requires_grad_(tensor.requires_grad)
    on_gradient, accumulated = (list((hooks or {}).values()) for hooks in _hooks(tensor))
    # As `torch.utils.swap_tensors`, which refuses where somebody has a weak reference.
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, other)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # else registering adds to what nobody reads
        setattr(tensor, name, None)
    if tensor.requires_grad:
        for hook in on_gradient:
            tensor.register_hook(hook)
        for hook in accumulated:
            tensor.register_post_accumulate_grad_hook(hook)
    return other


def give_up_memory(value: Any) -> None:
    """Let the tensors of an object have shapes and no memory, but for single numbers, which may count something.

    There is no way back: this is for a process that is thrown away.
    """
    for tensor in tensors_in(value):
        if tensor.numel() > 1 and tensor.layout is torch.strided and not is_lazy(tensor):
            size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
            _exchange(tensor, torch.empty_strided(size, stride, dtype=dtype, device="meta"))


_kept_real: list[torch.Tensor] = []


class _Unchanged:
    """Stands for a module's `_apply`, and in a copy of the module for that of the copy.

    It doesn't hold the module: a copy that a step makes goes with its last user, as no collector runs in a trace.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, function: Any, recurse: bool = True) -> torch.nn.Module | None:
        return self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unchanged":
        module = self._module()
        return self if module is None else _Unchanged(memo.get(id(module), module))


@contextmanager
def copyable_fakes() -> Iterator[None]:
    """Let `copy.deepcopy` copy fake tensors, which `self.log` and torchmetrics do with their states.

    And let `nn.Module.to` swap fake parameters of what is made in a trace, such as adapters of peft:
    `torch.utils.swap_tensors` refuses where somebody has a weak reference, which fakes have always.
    """

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        known: torch.Tensor | None = memo.get(id(self))
        if known is not None:
            return known
        with torch.no_grad():
            clone: torch.Tensor = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            clone = torch.nn.Parameter(clone, self.requires_grad)
        elif self.requires_grad and self.is_leaf:
            clone.requires_grad_(True)
        memo[id(self)] = clone
        return clone

    swap_real = torch.utils.swap_tensors

    def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
        (_exchange if isinstance(tensor, FakeTensor) else swap_real)(tensor, other)

    with replaced(FakeTensor, "__deepcopy__", deepcopy), replaced(torch.utils, "swap_tensors", swap):
        yield


@contextmanager
def transformers_not_tracing() -> Iterator[None]:
    """Keep transformers from treating fake tensors as a compiler trace, which would build another attention mask."""
    try:
        import transformers.utils.import_utils as import_utils
    except ImportError:
        yield
        return
    with replaced(import_utils, "is_fake_tensor", lambda value: False):
        yield


@contextmanager
def initialized_at_once() -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` draw fake tensors once, as values of theirs need no second draw.

    Since torch 2.13 it draws until no value is out of bounds. Whether one is, nobody knows of a fake tensor, so that it
    would go on until the limit of turns, thousands of them for each weight.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    @torch.no_grad()
    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor.normal_(generator=kwargs.get("generator"))
        return original(tensor, *args, **kwargs)

    with replaced(torch.nn.init, "_no_grad_trunc_normal_", draw):
        yield


_QUANTIZED = ("quantization_config", "load_in_8bit", "load_in_4bit")

_PLACE = ("revision", "cache_dir", "token", "local_files_only", "subfolder")
"""Arguments that say where the configuration is to be found."""


@contextmanager
def fake_pretrained_weights(device: str | None = None) -> Iterator[None]:
    """Let `from_pretrained` build the architecture without reading the weights, whose values no trace needs.

    That of transformers' models and of diffusers'.
    """

    def replacing(build: Callable[..., Any]) -> Any:
        def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
            name = pretrained_model_name_or_path  # upstream's name for it, which callers use
            asked = next((key for key in _QUANTIZED if kwargs.get(key)), None)
            if asked is not None:
                raise ValueError(
                    f"`from_pretrained({name!r}, {asked}=...)`: weights that are quantized while they are loaded can't "
                    "be estimated without them. Load them plainly and use the callback `QuantizedWeights`, or "
                    "`--measure`."
                )
            dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
            with torch.device(device) if device is not None else nullcontext():
                model = build(cls, name, dtype, kwargs).eval()
            return (model, {}) if kwargs.get("output_loading_info") else model

        return classmethod(from_pretrained)

    with ExitStack() as stack:
        for library, kind, build in (
            ("transformers.modeling_utils", "PreTrainedModel", _build_of_transformers),
            ("diffusers.models.modeling_utils", "ModelMixin", _build_of_diffusers),
        ):
            if library in sys.modules:
                owner = getattr(sys.modules[library], kind)
                stack.enter_context(replaced(owner, "from_pretrained", replacing(build)))
        yield


def _build_of_transformers(cls: Any, name: Any, dtype: Any, kwargs: dict[str, Any]) -> Any:
    """Build what `PreTrainedModel.from_pretrained` would fill with weights."""
    from transformers import AutoConfig, PreTrainedModel

    config, attention = kwargs.pop("config", None), kwargs.pop("attn_implementation", None)
    of_model = kwargs
    if config is None or isinstance(config, str):
        kind, source = cls.config_class or AutoConfig, config or name
        config, of_model = kind.from_pretrained(source, return_unused_kwargs=True, **kwargs)
    # The others say where weights come from and go to, and nothing about the model.
    of_model = {key: of_model[key] for key in inspect.signature(cls.__init__).parameters if key in of_model}
    if attention is not None:
        config._attn_implementation = attention
    options = {} if dtype in (None, "auto") else {"dtype": dtype}
    # As where real weights are read: values that are replaced anyway aren't drawn.
    with replaced(PreTrainedModel, "initialize_weights", lambda model: None):
        return cls._from_config(config, **options, **of_model)


def _build_of_diffusers(cls: Any, name: Any, dtype: Any, kwargs: dict[str, Any]) -> Any:
    """Build what `ModelMixin.from_pretrained` would fill with weights, of the default dtype unless told otherwise."""
    place = {key: kwargs[key] for key in _PLACE if key in kwargs}
    if not isinstance(dtype, torch.dtype):  # diffusers takes float32 for what it doesn't know ("auto")
        dtype = torch.get_default_dtype() if dtype is None else torch.float32
    with default_dtype(None if dtype.itemsize == 1 else dtype):  # float8 is no default
        model = cls.from_config(cls.load_config(name, **place), **kwargs)  # takes what its constructor does
    kept = frozenset(cls._keep_in_fp32_modules or ())
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                own_dtype = dtype if kept.isdisjoint((*path.split("."), own)) else torch.float32
                if parameter.dtype != own_dtype:
                    loaded = parameter.detach().to(own_dtype)
                    module._parameters[own] = torch.nn.Parameter(loaded, parameter.requires_grad)
    return model
