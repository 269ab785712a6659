"""Patches of torch that let a trace on fake CPU tensors behave as the real step does.

- Recurrent layers keep memory for backward that torch's fake kernels take to be empty. On the CPU `nn.LSTM` runs
  oneDNN's layer, whose workspace is found by running the layer once on zeros. On CUDA cuDNN decides by a rule that is
  not published, so that recurrent layers that are trained are refused there.
- Packed sequences are padded as their real lengths say.
- Grouped products, which mixtures of experts use, have a fake kernel for one dtype only.
- Optimizers choose `_foreach_` kernels as they would on CUDA.
- Python code can read fake tensors as numbers, and compare their addresses but not follow them.

Written for torch 2.11-2.13; each part names the private API that it patches, and `tests/truth/profile/test_patches.py`
fails when that moves.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.optim.optimizer as optimizer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memfit.profile.fake_mode import TracingFakeMode
from lightning_memfit.profile.integers import RealIntegers
from lightning_memfit.profile.replaced import replaced

aten = torch.ops.aten

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")
"""Functions of `torch._VF` that run a fused kernel on CUDA."""


class UnknownKernelError(RuntimeError):
    """What a kernel allocates on the device is not known."""


@contextmanager
def padded_sequences() -> Iterator[None]:
    """Pad packed sequences by operators: torch's own function writes lengths to memory that fakes don't have."""

    def pad(data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total: int) -> Any:
        with _disable_current_modes():
            counts = batch_sizes.tolist()
            lengths = torch.tensor([sum(count > sample for count in counts) for sample in range(counts[0])])
        padded = data.new_full((max(total, len(counts)), counts[0], *data.shape[1:]), value)
        start = step = 0
        for count, group in groupby(counts):  # as torch copies runs of steps in which as many sequences go on
            steps = len(list(group))
            part = data[start : start + steps * count].view(steps, count, *data.shape[1:])
            padded[step : step + steps, :count].copy_(part)
            start, step = start + steps * count, step + steps
        return padded.transpose(0, 1) if batch_first else padded, lengths

    with replaced(torch._VF, "_pad_packed_sequence", pad):
        yield


@contextmanager
def refuse_fused_recurrence() -> Iterator[None]:
    """Raise `UnknownKernelError` where a recurrent layer is called so that its backward will run."""

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

    with ExitStack() as stack:
        for name in _LAYERS:
            stack.enter_context(replaced(torch._VF, name, refusing(name, getattr(torch._VF, name))))
        yield


def give_kernels(fake_mode: TracingFakeMode, cuda: bool) -> None:
    """Let a mode make results where torch's own fake kernels refuse, or leave memory out."""
    kernels = {aten._grouped_mm.default: partial(_grouped_product, fake_mode, cuda)}
    if not cuda:
        kernels[aten.mkldnn_rnn_layer.default] = partial(_one_dnn_layer, fake_mode, {})
        kernels[aten.mkldnn_rnn_layer_backward.default] = partial(_one_dnn_gradients, fake_mode)
    fake_mode.kernels.update({id(func): kernel for func, kernel in kernels.items()})


def _one_dnn_layer(fake_mode: FakeTensorMode, known: dict[str, int], plain: Callable[..., Any], *args: Any) -> Any:
    """Results of oneDNN's recurrent layer, with the workspace that the real one makes."""
    result = plain(args)
    if not torch.is_grad_enabled():
        return result
    key = repr(tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, args))
    if key not in known:
        with _disable_current_modes():
            known[key] = aten.mkldnn_rnn_layer.default(*tree_map(_zeros_like, args))[3].nbytes
    output, hidden, cell, workspace = result
    with fake_mode:
        return output, hidden, cell, workspace.new_empty(known[key])


def _one_dnn_gradients(fake_mode: FakeTensorMode, plain: Callable[..., Any], *args: Any) -> Any:
    """Gradients of that layer, which are fp32 whatever the weights are (`RNN.cpp` of `native/mkldnn`).

    Those that torch 2.11 fakes have the type of the weights, and so miss the copies that autocast makes.
    """
    gradients = plain(args)
    with fake_mode:
        return tuple(gradient.new_empty(gradient.shape, dtype=torch.float32) for gradient in gradients)


def _grouped_product(
    fake_mode: FakeTensorMode,
    cuda: bool,
    plain: Callable[..., Any],
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Result of `torch.nn.functional.grouped_mm`, of mixtures of experts.

    torch's fake kernel refuses all dtypes but bfloat16; this one takes those that real kernels do. Its shape rule is
    that of `torch._meta_registrations`; rows are padded to 16 bytes on CUDA (`create_grouped_gemm_output_tensor` in
    torch's `GroupedMMUtils.h`).
    """
    if left.dtype != right.dtype or left.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return plain((left, right, offs, bias, out_dtype))  # it says what is wrong
    for operand in (left, right):
        row = max(operand.stride(-1), operand.stride(-2)) * operand.element_size()
        if row % 16:
            raise RuntimeError(f"strides should be multiple of 16 bytes, not {row}")
    shape = list(grouped_product_shape(left.shape, right.shape, None if offs is None else offs.size(0)))
    step = 16 // left.element_size() if cuda else 1
    padded = [*shape[:-1], -(-shape[-1] // step) * step]
    with fake_mode:
        return torch.empty(padded, dtype=out_dtype or left.dtype, device="cpu")[..., : shape[-1]]


def grouped_product_shape(left: Any, right: Any, groups: int | None) -> tuple[int, ...]:
    """Shape of a grouped product: groups are rows of `left`, columns of `right`, or what both sum over."""
    if len(left) == 2 and len(right) == 2:
        assert groups is not None
        return groups, left[0], right[1]
    if len(left) == 2:
        return left[0], right[-1]
    return (left[1], right[1]) if len(right) == 2 else (left[0], left[1], right[-1])


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
    devices = [*_OPTIMIZER._get_foreach_kernels_supported_devices(), *(["cpu"] if cuda else [])]
    with ExitStack() as stack:
        for owner in (_OPTIMIZER, _foreach_utils):
            types = [*owner._foreach_supported_types, FakeTensor]
            stack.enter_context(replaced(owner, "_foreach_supported_types", types))
        stack.enter_context(replaced(_OPTIMIZER, "_get_foreach_kernels_supported_devices", lambda: devices))
        yield


# --- reading fakes as numbers -----------------------------------------------------------------------------------------

# `tensor.numpy()` and `torch.tensor([tensor, ...])` read memory without passing torch's dispatcher. Patched, they get
# the values that `.item()` gives: the real values of integers, assumed ones for everything else.


class Address(NamedTuple):
    """What `data_ptr()` of a fake tensor gives: it can be compared, as code does that looks for shared tensors.

    It is no number, as whoever reads memory at an address needs one: the process would end.
    """

    storage: int
    """Identity of the tensor's storage."""
    offset: int
    """Bytes from the start of its storage."""

    def __mod__(self, alignment: int) -> int:
        return self.offset % alignment  # torch's allocators align storages


@contextmanager
def readable_fakes(integers: RealIntegers) -> Iterator[None]:
    """Patch torch so that Python code can read fake tensors as numbers."""

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return integers.read(self)

    def formatted(self: torch.Tensor, spec: str) -> str:
        """As `torch.Tensor.__format__` does for plain scalars (`f"expert_{index}"` is a name)."""
        known = self.dim() == 0 and (spec or integers.value_of(self) is not None)
        return format(self.detach().item() if known else repr(self), spec)

    with ExitStack() as stack:
        stack.enter_context(replaced(FakeTensor, "__format__", formatted))
        stack.enter_context(replaced(FakeTensor, "numpy", numpy))

        def address(self: torch.Tensor) -> Address:
            return Address(self.untyped_storage()._cdata, int(self.storage_offset()) * self.element_size())

        def address_of_storage(self: torch.UntypedStorage) -> Any:
            if self.device.type != "meta":
                return storage_address(self)
            return Address(self._cdata, 0)

        storage_address = torch.UntypedStorage.data_ptr
        stack.enter_context(replaced(torch.UntypedStorage, "data_ptr", address_of_storage))
        stack.enter_context(replaced(FakeTensor, "data_ptr", address))
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
