"""`RealIntegers`: the real values of small integer and boolean tensors, carried along with their fakes.

Ids, masks and positions steer control flow (`mask.all()`, `lengths.max().item()`, boolean indexing). With their real
values the traced step follows the branch the real batch would take. A value computed from floats is unknown in a trace:
it gets an assumed one, and the assumption is recorded.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_memfit.profile.fake import fake_clone

aten = torch.ops.aten

_INTEGER_TYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_VALUE_SIZED = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_FINITE = {aten.isnan.default, aten.isinf.default, aten.eq.Tensor, aten.ne.Scalar}
_MAX_FLOATS = 1 << 16
"""Floats computed from integers alone (`lengths.float().mean()`) are carried up to this many."""
_FACTORIES_WITH_VALUES = {aten.arange, aten.scalar_tensor, aten.zeros, aten.ones, aten.full}
_WITHOUT_VALUES = {aten.empty, aten.randint, aten.empty_like, aten.empty_strided}


@dataclass(frozen=True)
class AssumedValues:
    """What a trace answers when a program asks for a value that only real data could tell."""

    floating: float = 1.0
    boolean: bool = False
    integer: int = 1

    def of(self, dtype: torch.dtype) -> float | bool | int:
        """The assumed value of a dtype."""
        if dtype.is_floating_point:
            return self.floating
        return self.boolean if dtype is torch.bool else self.integer


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class UnknownSizeError(RuntimeError):
    """The size of a tensor depends on values that a trace doesn't have."""


class RealIntegers(TorchDispatchMode):
    """Compute real integers along with their fakes.

    Args:
        fake_mode: Mode of the fakes.
        max_elements: Larger integer tensors lose their values.
        assumed: What `.item()` answers for unknown values.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, assumed: "AssumedValues | None" = None, max_elements: int = 1 << 22
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self.max_elements = max_elements
        self.assumed = assumed or AssumedValues()
        self.assumptions: list[str] = []
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, bool]] = {}

    def attach(self, fake: torch.Tensor, real: torch.Tensor, finite: bool = False) -> torch.Tensor:
        """Remember the values of a fake tensor, and whether they rest on floats being finite."""
        key = id(fake)

        def forget(_: Any, values: dict[int, Any] = self._values, key: int = key) -> None:
            values.pop(key, None)

        self._values[key] = (weakref.ref(fake, forget), real, finite)
        return fake

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Real values of a fake tensor, if known; for a real tensor, such as a literal, a copy of it."""
        if not isinstance(tensor, FakeTensor):
            known = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= _MAX_FLOATS
            with _disable_current_modes():
                return tensor.detach().clone() if known else None
        entry = self._values.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def fake_batch(self, batch: Any) -> Any:
        """Turn a real batch (any object that can be copied) into fakes that keep their integers."""

        def remember(real: torch.Tensor, fake: torch.Tensor) -> None:
            if real.dtype in _INTEGER_TYPES and real.device.type != "meta":
                with _disable_current_modes():
                    self.attach(fake, real.detach().cpu().clone())  # the step may write to it

        return fake_clone(batch, self.fake_mode, on_copy=remember)

    def read(self, tensor: torch.Tensor) -> Any:
        """NumPy array of a fake tensor's values if they are known, otherwise of assumed ones."""
        value = self.value_of(tensor)
        with _disable_current_modes():
            if value is not None:
                return value.detach().cpu().numpy().copy()
            answer = self.assumed.of(tensor.dtype)
            self.assumptions.append(f"{tensor.numel()} unknown {_name(tensor.dtype)} values were read as {answer}")
            return torch.full(tuple(tensor.shape), answer, dtype=tensor.dtype).numpy()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._item(func, args[0])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        real = self._real_result(func, args, kwargs, tensors)
        finite = any(self._rests_on_finite(tensor) for tensor in tensors)
        if real is None and func in _FINITE:
            real, finite = self._taken_finite(func, args), True
        if func is aten.equal.default and isinstance(real, bool):
            return real
        if func in _VALUE_SIZED:
            return self._value_sized(func, args, kwargs, real)
        if func._overloadpacket is aten.index and tensors:
            args = (args[0], self._integer_indices(args[1]))
        result = func(*args, **kwargs)
        if real is not None:
            self._attach_all(result, real, finite)
        elif func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        return result

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of tensors that unknown ones were written to, and of their views."""
        arguments = func._schema.arguments
        given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
        written = {
            tensor.untyped_storage()._cdata
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name))
            if isinstance(tensor, torch.Tensor)
        }
        for key, (reference, _, _) in list(self._values.items()):
            tensor = reference()
            if tensor is not None and tensor.untyped_storage()._cdata in written:
                del self._values[key]

    def _rests_on_finite(self, tensor: torch.Tensor) -> bool:
        entry = self._values.get(id(tensor))
        return entry is not None and entry[2] and entry[0]() is tensor

    def _taken_finite(self, func: Any, args: Any) -> torch.Tensor | None:
        """Answer of `isnan`, `isinf` and the operators that make up `isfinite`, for the finite values of training."""
        tensor = args[0]
        if tensor.numel() > self.max_elements or not tensor.is_floating_point():
            return None
        if func is aten.eq.Tensor and args[1] is not tensor:
            return None
        if func is aten.ne.Scalar and args[1] != float("inf"):
            return None
        with _disable_current_modes():
            return torch.full(tuple(tensor.shape), func in (aten.eq.Tensor, aten.ne.Scalar))

    def _item(self, func: Any, tensor: torch.Tensor) -> Any:
        value = self.value_of(tensor)
        if value is not None:
            if self._rests_on_finite(tensor):
                self.assumptions.append("floating-point values were taken to be finite")
            with _disable_current_modes():
                return value.item()
        try:
            return func(tensor)  # constants that the fake mode knows itself
        except DataDependentOutputException:
            answer = self.assumed.of(tensor.dtype)
            self.assumptions.append(f"an unknown {_name(tensor.dtype)} value was read as {answer}")
            return answer

    def _real_result(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        packet = func._overloadpacket
        if packet in _WITHOUT_VALUES or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not tensors and not (
            packet in _FACTORIES_WITH_VALUES and kwargs.get("dtype", torch.int64) in _INTEGER_TYPES
        ):
            return None
        values = {id(tensor): self.value_of(tensor) for tensor in tensors}
        if any(value is None for value in values.values()):
            return None

        def substitute(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return values[id(value)]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        with _disable_current_modes(), torch.no_grad():
            try:
                return func(*tree_map(substitute, args), **tree_map(substitute, kwargs))
            except (RuntimeError, NotImplementedError):
                return None

    def _value_sized(self, func: Any, args: Any, kwargs: Any, real: Any) -> Any:
        tensor = args[0]
        if real is None and func is aten.bincount.default:
            return self._unknown_counts(*args, **kwargs)
        if real is None and func is aten._unique2.default:
            # torchmetrics checks its inputs like this and keeps only the length of the result
            self.assumptions.append(f"the distinct values of {tensor.numel()} unknown elements were taken to be one")
            with _disable_current_modes():
                real = torch.zeros(tensor.shape, dtype=tensor.dtype).unique(return_inverse=True, return_counts=True)
        if real is None:
            raise UnknownSizeError(f"the output size of {func} depends on the values of floating-point tensors")

        def convert(value: torch.Tensor) -> torch.Tensor:
            return self.attach(self._empty_like(value), value)

        return tree_map(convert, real)

    def _unknown_counts(self, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
        """Counts of unknown values, taken to be below `minlength` if the caller gave one, as torchmetrics does."""
        if not minlength:
            raise UnknownSizeError("the length of torch.bincount without `minlength` depends on unknown values")
        self.assumptions.append(
            f"{tensor.numel()} unknown counted values were taken to lie below `minlength={minlength}`"
        )
        with self.fake_mode:
            return torch.empty(minlength, dtype=torch.int64 if weights is None else weights.dtype, device="cpu")

    def _integer_indices(self, indices: Any) -> Any:
        """Replace boolean masks, whose result size depends on values, by the integer indices they select."""
        converted: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                converted.append(index)
                continue
            value = self.value_of(index)
            if value is None:
                raise UnknownSizeError("a boolean index computed from floating-point tensors has a data-dependent size")
            with _disable_current_modes():
                places = value.nonzero(as_tuple=True)
            converted += [self.attach(self._empty_like(place), place) for place in places]
        return converted

    def _attach_all(self, result: Any, real: Any, finite: bool) -> None:
        fakes, values = tree_leaves(result), tree_leaves(real)
        if len(fakes) != len(values):
            return
        for fake, value in zip(fakes, values, strict=True):
            if not (isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor)):
                continue
            limit = self.max_elements if value.dtype in _INTEGER_TYPES else _MAX_FLOATS
            if value.numel() <= limit and fake.shape == value.shape:
                self.attach(fake, value, finite)

    def _empty_like(self, real: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes(), self.fake_mode:
            return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="cpu")
