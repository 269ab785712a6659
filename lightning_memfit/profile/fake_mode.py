"""The mode that traces' fake tensors belong to: torch's own, which finds results it has seen before in half the time.

torch remembers what an operator makes of arguments by a key of all that the result may depend on. Putting that key
together takes most of the time of an operator that is known. Written for torch 2.11-2.13
(`torch._subclasses.fake_tensor`); `tests/truth/profile/test_fake_mode.py` fails when that moves.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _DispatchCacheKey
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from typing_extensions import override

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that stand for themselves. Theirs goes into the key as well, as 1, 1.0 and True are equal."""


class Uncompiled:
    """A dispatch mode of a trace, in which nothing is compiled.

    torch puts a guard around what a mode does with an operator, so that it isn't compiled. In a trace, where compiled
    parts run as they are written, three modes see each operator, and a guard takes a microsecond each time.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shall put its guard around this class's `__torch_dispatch__`."""
        return False


class TracingFakeMode(Uncompiled, FakeTensorMode):
    """torch's mode of fake tensors with quick keys for calls of operators on plain arguments.

    Plain are strided fakes of this mode, numbers, strings, types and devices, and lists of them; keys of other calls
    are torch's. A key tells apart whatever torch's does. Only a memory format isn't in it, as shape and strides decide
    that.
    """

    __torch_dispatch__ = inspect.unwrap(FakeTensorMode.__torch_dispatch__)

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kernels: dict[int, Callable[..., Any]] = {}
        """What makes results in the mode's place, by the operator's identity, of the mode's way and the arguments."""

    @override
    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = self.kernels.get(id(func))
        if kernel is None:
            return super().dispatch(func, types, args, kwargs or {})
        return kernel(partial(super().dispatch, func, types), *args, **(kwargs or {}))

    @override
    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if self.shape_env is None and get_proxy_mode() is None:
            values = [
                func,
                torch.get_default_dtype(),
                torch._C._get_default_device(),
                torch.is_inference_mode_enabled(),
                len(args),
                *(kwargs or ()),
            ]
            if self._describe(values, args) and (not kwargs or self._describe(values, kwargs.values())):
                return _DispatchCacheKey(tuple(values))
        return super()._cache_key(state, func, args, kwargs)

    def _describe(self, values: list[Any], arguments: Iterable[Any]) -> bool:
        """Add arguments to the values of a key; whether all of them are plain."""
        for one in arguments:
            kind = type(one)
            if kind in _PLAIN:
                values += (kind, one)
            elif kind is FakeTensor:
                if one.fake_mode is not self or one.constant is not None or one.layout is not torch.strided:
                    return False
                values += (
                    kind,
                    one.dtype,
                    one.shape,
                    one.stride(),
                    one.fake_device,
                    one.storage_offset(),
                    one.untyped_storage().nbytes(),
                    one.requires_grad,
                    one.is_quantized,
                    one.is_conj(),
                    one.is_neg(),
                    one.is_inference(),
                )
            elif kind is list or kind is tuple or kind is torch.Size:
                values += (kind, len(one))
                if not self._describe(values, one):
                    return False
            else:
                return False
        return True
