"""Find out, in a training step, whether frozen weights are read where their layer's adapter or codes aren't seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import override

from lightning_memfit.adapters.layer import FrozenLinear, UnlistedWeight, is_reading, watch_layers


class Watch(TorchDispatchMode):
    """Watch a forward pass: `outside` are layers whose weights themselves were read by something else.

    A module may keep a weight in a list or a closure, or sum over its parameters: then it computes with the frozen
    weight alone. Reads without gradients are taken for logging. `without_gradient` are layers that ran in a reentrant
    checkpoint (torch.utils.checkpoint) and not again since: their adapters would get no gradient.
    """

    def __init__(self, layers: Mapping[str, FrozenLinear]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: dict[str, str] = {}
        self.without_gradient: set[str] = set()
        self._layers = layers
        self._names = {layer.raw.untyped_storage()._cdata: name for name, layer in layers.items()}
        self._handles: list[Any] = []
        self._is_attached = False

    def attach(self) -> None:
        """Follow the layers' own forward passes until `detach`."""
        watch_layers(1)
        self._is_attached = True
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._begin(name)))

    def detach(self) -> None:
        """Leave the layers alone. Safe to call twice."""
        if self._is_attached:
            watch_layers(-1)
            self._is_attached = False
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, name: str) -> Callable[[nn.Module, Any], None]:
        def begin(layer: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                self.without_gradient.discard(name)
            elif _in_reentrant_checkpoint():
                self.without_gradient.add(name)

        return begin

    @override
    def __enter__(self) -> Watch:
        self._undo = _list_quantized()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._undo()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outside = not is_reading() and torch.is_grad_enabled()
        # Backward reads frozen weights, too, and manual optimization runs it inside the step.
        if outside and not func.is_view and torch._C._current_graph_task_id() == -1:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and (name := self._name(leaf)) is not None:
                    self.outside.setdefault(name, str(func))
        return func(*args, **(kwargs or {}))

    def _name(self, tensor: Tensor) -> str | None:
        try:
            return self._names.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage
            return None


def _list_quantized() -> Callable[[], None]:
    """Let modules list their quantized weights, too, to whoever asks for their parameters; return how to undo it.

    Every module, as a step may go over the parameters of any part. This package's own code is told the truth.
    """
    own = nn.Module.named_parameters

    def named_parameters(
        self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        yield from own(self, prefix, recurse, remove_duplicate)
        frame = inspect.currentframe()
        while frame is not None and (frame.f_code is named_parameters.__code__ or _is_in(frame, nn.Module.__module__)):
            frame = frame.f_back
        if frame is None or _is_in(frame, __name__.partition(".")[0]):
            return
        for path, child in self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]:
            if isinstance(child, FrozenLinear) and child.codes is not None:
                name = f"{path}.weight" if path else "weight"
                yield name, UnlistedWeight(child, name)

    def undo() -> None:
        nn.Module.named_parameters = own  # type: ignore[method-assign]

    nn.Module.named_parameters = named_parameters  # type: ignore[method-assign]
    return undo


def _is_in(frame: Any, module: str) -> bool:
    name = frame.f_globals.get("__name__", "")
    return bool(name == module or name.startswith(f"{module}."))


def _in_reentrant_checkpoint() -> bool:
    frame: Any = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False
