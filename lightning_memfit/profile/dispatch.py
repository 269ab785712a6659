"""Make a trace on fake CPU tensors issue the operators that a CUDA device would.

Four things differ between the two in what they allocate: dropout (CUDA keeps a boolean mask), scaled dot-product
attention (which kernel is chosen, and what it saves), the list of operators that autocast runs in fp32, and what some
kernels return (`CUDA_RESULTS`). The rules are those of torch 2.11-2.13: `aten/src/ATen/native/Dropout.cpp`,
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `aten/src/ATen/autocast_mode.h` and the kernels in
`aten/src/ATen/native/cuda`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

aten = torch.ops.aten

AttentionBackend = Literal["flash", "efficient", "cudnn", "math"]

_HALF = (torch.float16, torch.bfloat16)

_PREFERS_CUDNN = ((9, 0), (10, 0))
"""Data-centre Hopper and Blackwell, where torch asks cuDNN first (`check_prefer_cudnn_attention`)."""

_CUDNN_LAST: tuple[AttentionBackend, ...] = ("flash", "efficient", "math", "cudnn")
_CUDNN_FIRST: tuple[AttentionBackend, ...] = ("cudnn", "flash", "efficient", "math")
"""The two orders in which torch asks by itself."""


def is_deterministic() -> bool:
    """Whether torch must not run kernels that aren't deterministic, more than warn of them."""
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not is_warning


def choose_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    capability: tuple[int, int],
    grouped: bool,
) -> AttentionBackend:
    """The kernel CUDA would take for attention over `query`, `key`, `value` of shape (batch, heads, sequence, head).

    It is the first, in torch's order, of those that are switched on as this is called (`sdpa_kernel`,
    `torch.backends.cuda.enable_flash_sdp`) and take the call.
    """
    call = _Call(query, key, value, mask, dropout, capability, grouped)
    order = _CUDNN_FIRST if capability in _PREFERS_CUDNN else _CUDNN_LAST
    on = [kernel for kernel in order if _IS_ON[kernel]()]
    for kernel in on:
        if _TAKES[kernel](call):
            return kernel
    raise RuntimeError(
        f"No available kernel. Aborting execution. Of the kernels for attention that are switched on "
        f"({', '.join(on) or 'none'}), none takes queries {tuple(query.shape)} of {query.dtype}"
        f"{'' if mask is None else ' with a mask'} on CUDA {capability[0]}.{capability[1]}. Switch "
        "`SDPBackend.MATH` on, which takes all"
    )


@dataclass(frozen=True)
class _Call:
    """A call of attention. The kernels' conditions are those of `can_use_..._attention` in torch's `sdp_utils.cpp`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    capability: tuple[int, int]
    grouped: bool

    @property
    def head(self) -> int:
        """Elements of a head of the queries."""
        return self.query.size(-1)

    @property
    def is_half(self) -> bool:
        """Whether it is in half precision."""
        return self.query.dtype in _HALF

    @property
    def has_batch(self) -> bool:
        """Whether it has the four dimensions that fused kernels take."""
        return self.query.dim() == 4

    def fits_cudnn(self) -> bool:
        """Whether cuDNN takes it."""
        is_narrow = self.head == self.value.size(-1) and self.head % 8 == 0 and self.head <= 128
        return self.has_batch and self.is_half and is_narrow and self.capability >= (8, 0) and not is_deterministic()

    def fits_flash(self) -> bool:
        """Whether flash attention takes it."""
        same_head = self.head == self.value.size(-1)
        if not self.has_batch or self.mask is not None or not self.is_half or self.head > 256 or not same_head:
            return False
        narrow_card = self.capability[0] == 8 and self.capability[1] in (6, 9)
        backward_too_large = narrow_card and self.head > 192 and self.dropout > 0
        return self.capability >= (8, 0) and not backward_too_large

    def fits_efficient(self) -> bool:
        """Whether memory-efficient attention takes it."""
        if not self.has_batch or (self.grouped and self.query.size(1) != self.key.size(1)):
            return False
        multiple = 8 if self.is_half else 4
        aligned = self.head % multiple == 0 and self.value.size(-1) % multiple == 0
        has_type = self.capability >= (8, 0) or self.query.dtype != torch.bfloat16
        return aligned and has_type and self.capability >= (5, 0)


_TAKES: dict[AttentionBackend, Callable[[_Call], bool]] = {
    "cudnn": _Call.fits_cudnn,
    "flash": _Call.fits_flash,
    "efficient": _Call.fits_efficient,
    "math": lambda call: True,
}

_IS_ON: dict[AttentionBackend, Callable[[], bool]] = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


@dataclass(frozen=True)
class CudaResults:
    """How the results of an operator's CUDA kernel differ from those of its fake one."""

    order: tuple[int, ...]
    """Places of the results in the order in which they are allocated."""
    float32: tuple[int, ...] = ()
    """Places of results that are float32 for operands of 16 bits, as what is summed up in float32 is kept so."""

    def dtypes(self, results: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Names of the types of the results for operands of 16 bits."""
        kept = (str(result.dtype).removeprefix("torch.") for result in results)
        return tuple("float32" if place in self.float32 else name for place, name in enumerate(kept))


CUDA_RESULTS = {
    id(aten.native_dropout.default): CudaResults(order=(1, 0)),  # Dropout.cu, `dropout_cuda`
    id(aten.native_layer_norm.default): CudaResults(order=(0, 1, 2), float32=(1, 2)),  # layer_norm_kernel.cu
}
"""By identity, as torch's hash of an operator is written in Python."""


class CudaDispatch:
    """While active, let attention choose its kernel, and dropout run its operator, as on CUDA.

    Both are patched in torch's dispatcher, where calls from C++ and by any name come. A `TorchFunctionMode` would be
    popped while backward runs, so that a checkpoint's recomputation would differ from its forward.
    """

    def __init__(self, capability: tuple[int, int] = (8, 0)) -> None:
        self.capability = capability
        self.used: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "CudaDispatch":
        kernels: _Kernels = {
            # The second key is asked in inference mode, where there is no autograd, and the third under `torch.vmap`.
            "scaled_dot_product_attention": (self._attention, ("AutogradCPU", "Python", "FuncTorchVmapMode")),
            "dropout": (_fused_dropout, ("AutogradCPU",)),
        }
        self._stack.enter_context(_in_dispatcher(kernels))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        chosen = choose_attention(query, key, value, attn_mask, dropout_p, self.capability, enable_gqa)
        self.used[chosen] = self.used.get(chosen, 0) + 1
        with torch.autocast("cpu", enabled=False):
            output: torch.Tensor
            if chosen == "flash":
                output = _flash(query, key, value, dropout_p, is_causal, scale)
            elif chosen == "cudnn" or chosen == "efficient":
                output = _masked(chosen, query, key, value, attn_mask, dropout_p, is_causal, scale)
            else:
                mask = _additive(attn_mask, query)
                output = aten._scaled_dot_product_attention_math(
                    query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
                )[0]
            return output


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, scale: float | None) -> Any:
    head = q.size(-1)
    padding = -head % 8
    if padding:  # the flash kernel takes heads in multiples of 8 and pads copies of its inputs
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
        scale = head**-0.5 if scale is None else scale
    out = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return out[..., :head] if padding else out


def _additive(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """A mask as the kernels take it: added to the scores (`convert_boolean_attn_mask` in torch).

    The default type of tensors plays no part in it: Lightning's true half precision sets it in forward, and not where a
    checkpoint recomputes.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=q.dtype, device=mask.device))
    return mask


def _masked(
    backend: Literal["cudnn", "efficient"],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Any:
    """The two kernels that take masks, and keep statistics for backward where there will be one."""
    mask = _additive(mask, q)
    if mask is not None:
        mask = mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))  # one per head
    statistics = q.requires_grad or k.requires_grad or v.requires_grad
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, statistics, dropout, causal, False, scale=scale)[
            0
        ]
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, statistics, dropout, causal, scale=scale)[0]


_Kernels = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
"""Kernels by the operators that run them, and the dispatch keys for which these do."""


@contextmanager
def _in_dispatcher(kernels: _Kernels) -> Iterator[None]:
    """Let operators run other kernels for some dispatch keys, in C++ as in Python; removed on exit."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, on replacing kernels of its own
            for name, (kernel, keys) in kernels.items():
                for key in keys:
                    library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()


def _fused_dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    """`aten::dropout` by `aten::native_dropout`, where CUDA runs that."""
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return torch.native_dropout(input, p, True)[0]


_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "renorm", "logsumexp"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "kl_div", "l1_loss"),
    *("hinge_embedding_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "soft_margin_loss"),
    *("multilabel_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"),
    *("dist", "pdist", "cdist"),
)
"""Operators that compute in fp32."""

_FP32_UNLESS_DTYPE = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum"),
    "sum.dim_IntList",
)
"""Operators that do so unless they are told another type."""


@contextmanager
def cuda_autocast_lists() -> Iterator[None]:
    """Give CPU autocast the fp32 operators of CUDA autocast; removed on exit."""
    kernels: _Kernels = {
        name: (_in_fp32(name), ("AutocastCPU",)) for name in (*_FP32, *_FP32_UNLESS_DTYPE) if _operator(name)
    }
    with _in_dispatcher(kernels):
        yield


def _operator(name: str) -> Any:
    """An operator by its name and overload; None if torch has none."""
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base, None), overload or "default", None)


def _in_fp32(name: str) -> Callable[..., Any]:
    operator, unless_dtype = _operator(name), name in _FP32_UNLESS_DTYPE
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            if not unless_dtype:
                return operator(*map(_to_fp32, args), **{key: _to_fp32(value) for key, value in kwargs.items()})
            if isinstance(args[0], torch.Tensor) and args[0].dtype in _HALF and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return run


def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF else value
    return type(value)(map(_to_fp32, value)) if isinstance(value, (list, tuple)) else value
