"""Fake clones: a module's structure with tensors that have shape, dtype and stride but no memory.

Written for torch 2.11-2.13 (`torch._subclasses.fake_tensor`) and transformers 5 (`is_fake_tensor`);
`tests/truth/profile/test_fake.py` fails when either moves.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memfit.memory.conversion import default_dtype, not_converted
from lightning_memfit.profile.copying import copied
from lightning_memfit.profile.replaced import replaced

T = TypeVar("T")


class _FakeCopy(TorchFunctionMode):
    """Turn the tensor copies inside `copy.deepcopy` into fake ones, with another floating dtype if asked."""

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        dtype: torch.dtype | None,
        on_copy: Callable[[torch.Tensor, torch.Tensor], object] | None,
    ) -> None:
        self.fake_mode = fake_mode
        self.dtype = dtype
        self.on_copy = on_copy

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone:
            return self.fake(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.fake(tensor)
            return memo[id(tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor."""
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        with self.fake_mode, torch.no_grad():
            if tensor.layout is torch.strided:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
            else:  # of its shape alone: see `must_be_strided`
                fake = torch.empty(tensor.size(), dtype=dtype, device="cpu")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if tensor.is_leaf:
            fake.requires_grad_(tensor.requires_grad)
        if self.on_copy is not None:
            self.on_copy(tensor, fake)
        return fake


class _Collect(TorchFunctionMode):
    """Note the tensors that `copy.deepcopy` meets, without copying them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.note(*args)
        return func(*args, **(kwargs or {}))

    def note(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) not in memo:
            self.tensors.append(tensor)
            memo[id(tensor)] = tensor
        return tensor


def must_be_strided(tensor: torch.Tensor, *_: object) -> None:
    """Refuse a tensor of another layout, for which `fake_clone` has none of the same memory; one for `on_copy`.

    Raises:
        NotImplementedError: If its layout is another one.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"fake tensors of layout {tensor.layout} don't tell what memory they hold")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in any object that `copied` can copy, in its order, each once."""
    collect = _Collect()
    # Fakes that `copyable_fakes` made copyable by a method of their own would pass by the mode.
    with replaced(FakeTensor, "__deepcopy__", lambda tensor, memo: collect.note(tensor, memo)), collect:
        copied(value)
    return list({id(tensor): tensor for tensor in collect.tensors}.values())


def fake_clone(
    value: T,
    fake_mode: FakeTensorMode,
    dtype: torch.dtype | None = None,
    on_copy: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    left_out: Iterable[torch.nn.Module] = (),
    known: Mapping[int, Any] | None = None,
) -> T:
    """Deep-copy any object, with fake CPU tensors in place of its tensors (real or meta). The original is untouched.

    Args:
        value: A module or any structure that `copy.deepcopy` can copy.
        fake_mode: Mode the new tensors belong to.
        dtype: Floating dtype of the clone, as after `module.to(dtype)`.
        on_copy: Called with every tensor that is not a parameter, and its fake.
        left_out: Modules that the clone replaces by empty ones, which can't be called.
        known: What stands in the clone for objects, by their `id`.
    """
    memo: dict[int, Any] = {**(known or {}), **{id(module): torch.nn.Module() for module in left_out}}
    trainer = getattr(value, "_trainer", None)
    if trainer is not None:
        memo[id(trainer)] = None  # a fitted module points at its trainer, which is not part of it
    for generator in _generators(value):
        memo[id(generator)] = generator.clone_state()
    if dtype is not None and isinstance(value, torch.nn.Module):
        as_it_is = _FakeCopy(fake_mode, None, on_copy)
        memo.update((id(tensor), as_it_is.fake(tensor)) for tensor in not_converted(value, dtype))
    with _FakeCopy(fake_mode, dtype, on_copy):
        clone = copied(value, memo)
    if isinstance(clone, torch.nn.Module):
        for child in clone.modules():
            # `.to()`, `.half()` and `.cpu()` would swap real data pointers, which fakes don't have.
            object.__setattr__(child, "_apply", _Unchanged(child))
    return clone


def _generators(value: Any) -> Iterator[torch.Generator]:
    """Random generators among a module's attributes, whose state must not be copied as a fake."""
    for child in value.modules() if isinstance(value, torch.nn.Module) else ():
        yield from (leaf for leaf in tree_leaves(dict(vars(child))) if isinstance(leaf, torch.Generator))


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
    """Let `copy.deepcopy` copy fake tensors, which `self.log` and torchmetrics do with their states."""

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

    with replaced(FakeTensor, "__deepcopy__", deepcopy):
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


_OF_LOADING = frozenset(
    {
        *("state_dict", "use_safetensors", "from_tf", "from_flax", "low_cpu_mem_usage", "device_map", "max_memory"),
        *("offload_folder", "offload_state_dict", "offload_buffers", "ignore_mismatched_sizes", "output_loading_info"),
        *("weights_only", "generation_config", "variant", "gguf_file", "key_mapping", "use_kernels", "kernel_config"),
        *("cache_dir", "force_download", "proxies", "local_files_only", "token", "use_auth_token", "revision"),
        *("subfolder", "commit_hash", "_commit_hash", "code_revision", "trust_remote_code", "mirror", "adapter_kwargs"),
        *("adapter_name", "tp_plan", "tp_size", "device_mesh", "distributed_config", "_from_auto", "_from_pipeline"),
    }
)
"""Arguments of `from_pretrained` that say where weights come from and go to, and nothing about the model."""

_QUANTIZED = ("quantization_config", "load_in_8bit", "load_in_4bit")

_HUB = ("revision", "cache_dir", "token", "local_files_only")
"""Arguments that say where the configuration is to be found."""


@contextmanager
def fake_pretrained_weights(
    device: str | None = None, note: Callable[[Any], object] = lambda model: None
) -> Iterator[None]:
    """Let `from_pretrained` build the architecture without reading the weights, whose values no trace needs.

    That of transformers' models and of diffusers'.

    Args:
        device: Where to build it; by default where the caller's modes have it, such as on fake tensors.
        note: Is given every model that is built so.
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
            note(model)
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
    of_config = {key: kwargs.pop(key) for key in list(kwargs) if key not in _OF_LOADING}
    hub = {key: kwargs[key] for key in _HUB if key in kwargs}
    if config is None or isinstance(config, str):
        kind, source = cls.config_class or AutoConfig, config or name
        config, of_config = kind.from_pretrained(source, return_unused_kwargs=True, **hub, **of_config)
    of_model = {key: value for key, value in of_config.items() if key not in hub}
    if attention is not None:
        config._attn_implementation = attention
    options = {} if dtype in (None, "auto") else {"dtype": dtype}
    # As where real weights are read: values that are replaced anyway aren't drawn.
    with replaced(PreTrainedModel, "initialize_weights", lambda model: None):
        return cls._from_config(config, **options, **of_model)


def _build_of_diffusers(cls: Any, name: Any, dtype: Any, kwargs: dict[str, Any]) -> Any:
    """Build what `ModelMixin.from_pretrained` would fill with weights, of the default dtype unless told otherwise."""
    place = {key: kwargs[key] for key in (*_HUB, "subfolder") if key in kwargs}
    of_model = {key: value for key, value in kwargs.items() if key not in _OF_LOADING}
    if not isinstance(dtype, torch.dtype):  # diffusers takes float32 for what it doesn't know ("auto")
        dtype = torch.get_default_dtype() if dtype is None else torch.float32
    with default_dtype(None if dtype.itemsize == 1 else dtype):  # float8 is no default
        model = cls.from_config(cls.load_config(name, **place), **of_model)
    kept = frozenset(cls._keep_in_fp32_modules or ())
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                own_dtype = dtype if kept.isdisjoint((*path.split("."), own)) else torch.float32
                if parameter.dtype != own_dtype:
                    loaded = parameter.detach().to(own_dtype)
                    module._parameters[own] = torch.nn.Parameter(loaded, parameter.requires_grad)
    return model
