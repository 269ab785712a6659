"""Patches of torch that let a trace on fake CPU tensors behave as the real step does.

- Recurrent layers keep memory for backward that torch's fake kernels take to be empty. On the CPU `nn.LSTM` runs
  oneDNN's layer, whose workspace is found by running the layer once on zeros. On CUDA cuDNN decides by a rule that is
  not published, so that recurrent layers that are trained are refused there.
- Optimizers choose `_foreach_` kernels as they would on CUDA.
- Python code can read fake tensors as numbers.

Written for torch 2.11-2.13; each part names the private API that it patches, and `tests/unit/profile/test_patches.py`
fails when that moves.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.optim.optimizer as optimizer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_memfit.profile.fake import replaced
from lightning_memfit.profile.integers import RealIntegers

aten = torch.ops.aten

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")
"""Functions of `torch._VF` that run a fused kernel on CUDA."""


class UnknownKernelError(RuntimeError):
    """What a kernel allocates on the device is not known."""


@contextmanager
def refuse_fused_recurrence() -> Iterator[None]:
    """Raise `UnknownKernelError` where a recurrent layer is called so that its backward will run."""
    functions: Any = torch._VF

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
                raise UnknownKernelError(
                    f"how much the CUDA kernel behind `{name}` keeps for backward is known to the device only, so that "
                    "an estimate for CUDA would be a guess (one for the CPU can be had)"
                )
            return original(*args, **kwargs)

        return call

    for name in _LAYERS:
        setattr(functions, name, refusing(name, getattr(functions, name)))
    try:
        yield
    finally:
        for name in _LAYERS:
            delattr(functions, name)  # they are looked up in torch's C++ module again


class OneDnnWorkspaces(TorchDispatchMode):
    """Give fake results of oneDNN's recurrent layer (`aten.mkldnn_rnn_layer`) the workspace that the real one makes.

    And its gradients the type of the real ones, which are fp32 whatever the weights are (`RNN.cpp` of `native/mkldnn`);
    those that torch 2.11 fakes have the type of the weights, and so miss the copies that autocast makes.

    Args:
        fake_mode: Mode of the fakes; must be active below this one.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self._known: dict[str, int] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten.mkldnn_rnn_layer_backward.default:
            with self.fake_mode:
                return tuple(gradient.new_empty(gradient.shape, dtype=torch.float32) for gradient in result)
        if func is not aten.mkldnn_rnn_layer.default or not torch.is_grad_enabled():
            return result
        output, hidden, cell, workspace = result
        size = self._workspace_bytes(func, args)
        with self.fake_mode:
            return output, hidden, cell, workspace.new_empty(size)

    def _workspace_bytes(self, func: Any, args: Any) -> int:
        key = repr(tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, args))
        if key not in self._known:
            with _disable_current_modes():
                self._known[key] = func(*tree_map(_zeros_like, args))[3].nbytes
        return self._known[key]


def _zeros_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(tuple(value.shape), dtype=value.dtype)


# --- horizontally batched optimizer kernels ---------------------------------------------------------------------------

# torch's optimizers choose `_foreach_` kernels by default for parameters on CUDA (in
# `torch.optim.optimizer._default_to_fused_or_foreach` and `torch.utils._foreach_utils._has_foreach_support`), and that
# of AdamW then needs scratch memory as large as the weights.

_OPTIMIZER: Any = optimizer  # its private names aren't typed


@contextmanager
def foreach_defaults(cuda: bool) -> Iterator[None]:
    """Count fake tensors as plain ones, and with `cuda` the CPU as a device whose optimizers default to `_foreach_`."""
    tables = (_OPTIMIZER._foreach_supported_types, _foreach_utils._foreach_supported_types)
    devices = _OPTIMIZER._get_foreach_kernels_supported_devices
    for table in tables:
        table.append(FakeTensor)
    if cuda:
        _OPTIMIZER._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        _OPTIMIZER._get_foreach_kernels_supported_devices = devices
        for table in tables:
            table.remove(FakeTensor)


# --- reading fakes as numbers -----------------------------------------------------------------------------------------

# `tensor.numpy()` and `torch.tensor([tensor, ...])` read memory without passing torch's dispatcher. Patched, they get
# the values that `.item()` gives: the real values of integers, assumed ones for everything else.


@contextmanager
def readable_fakes(integers: RealIntegers) -> Iterator[None]:
    """Patch torch so that Python code can read fake tensors as numbers.

    Args:
        integers: Knows the real values, and records assumptions.
    """

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return integers.read(self)

    with ExitStack() as stack:
        stack.enter_context(replaced(FakeTensor, "numpy", numpy))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(replaced(torch, name, _reading(getattr(torch, name))))
        yield


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory that reads fakes inside lists as numbers."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, (list, tuple)) and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(data)):
            data = tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, FakeTensor) else leaf, data)
        return function(data, *args, **kwargs)

    return make
