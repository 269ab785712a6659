"""`ChunkedLoss`: the loss of a Hugging Face language model, computed without ever holding all logits."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import Linear  # the class itself, which precisions of Lightning replace in `torch.nn` for a while
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memfit.memory.wrapping import own_attribute, wrap_method
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.model_facts import is_causal_lm
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.linear_cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile


class ChunkedLoss(TechniqueCallback):
    """Compute head and cross-entropy together in chunks, where a language model computes its loss of `labels`.

    The logits of such a call are computed when they are read. Loss and gradients are exact up to the order of
    additions, but a batch in which no token counts has the loss 0, where torch has NaN.

    Args:
        num_chunks: The sequence is cut into this many chunks, of which one has logits at a time.

    Raises:
        ValueError: If `num_chunks` is less than 1.
    """

    def __init__(self, num_chunks: int = 8) -> None:
        super().__init__()
        if num_chunks < 1:
            raise ValueError(f"`num_chunks={num_chunks}` must be at least 1.")
        self.num_chunks = num_chunks
        self._heads: list[ChunkedHead] = []

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap heads once the module is complete."""

        def wrap_heads() -> None:
            models = find_causal_models(pl_module)
            by_head: dict[nn.Module, list[Any]] = {}  # which an encoder-decoder shares with its decoder
            for model in models:
                by_head.setdefault(model.get_output_embeddings(), []).append(model)
            for head in self._heads:  # WeightAveraging calls `configure_model` once more
                by_head.pop(head.head, None)
            for group in by_head.values():
                self._heads.append(ChunkedHead(group, self.num_chunks))
                self.on_restore(self._heads[-1].restore)
            self.announce(f"loss of {', '.join(type(model).__name__ for model in models)} computed in chunks")

        self.on_restore(self._heads.clear)
        self.when_complete(pl_module, wrap_heads)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Refuse a module that computes its loss itself, before a weight changes."""
        if self._heads and not any(head.num_losses for head in self._heads):
            names = ", ".join(head.name for head in self._heads)
            raise MisconfigurationException(
                f"ChunkedLoss: {type(pl_module).__name__} takes no loss that {names} computes of `labels`. Pass "
                "`labels`, or leave ChunkedLoss out and call `lightning_memfit.linear_cross_entropy` with the hidden "
                "states and the head's weight."
            )

    @override
    def on_before_optimizer_step(self, *args: Any) -> None:
        """Let no logits be computed with later weights."""
        for head in self._heads:
            head.num_updates += 1


def find_causal_models(module: nn.Module) -> list[Any]:
    """Hugging Face language models in a module; an error if there is none."""
    models = [child for child in module.modules() if is_causal_lm(child)]
    if not models:
        raise ValueError(f"ChunkedLoss: the module {_NO_MODEL}")
    return models


class ChunkedHead:
    """A head that computes no logits while one of its models computes a loss."""

    def __init__(self, models: Sequence[Any], num_chunks: int) -> None:
        self.name = type(models[0]).__name__
        self.num_chunks = num_chunks
        self.head: nn.Module = models[0].get_output_embeddings()
        self.calls: list[_Call | None] = []
        """Running calls of the models, the innermost last; None for one without a loss."""
        self.num_losses = 0
        self.num_updates = 0
        """Steps of optimizers so far."""
        kind = type(self.head)
        kind = kind.__mro__[1] if is_parametrized(self.head) else kind  # torch gives it a class of its own
        if kind is not Linear or own_attribute(self.head, "forward") is not None:
            raise ValueError(self.refusal(f"has a {kind.__name__} for a head, and only an nn.Linear can be in chunks"))
        self._undo: list[Callable[[], object]] = [wrap_method(self.head, "forward", self._run_head)]
        for model in models:
            signature = inspect.signature(model.forward)
            self._undo.append(wrap_method(model, "forward", partial(self._run_model, model, signature)))
            model.forward.__signature__ = signature  # which `generate` asks for

    def restore(self) -> None:
        """Undo all changes."""
        while self._undo:
            self._undo.pop()()

    def _run_model(
        self, model: nn.Module, signature: inspect.Signature, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a model, and its head without logits if it is given labels."""
        given = signature.bind_partial(*args, **kwargs).arguments
        labels = {**given, **given.get("kwargs", {})}.get("labels")
        items = kwargs.get("num_items_in_batch")
        if isinstance(labels, Tensor) and items is not None:
            kwargs["num_items_in_batch"] = _at_least_one(items, labels)
        call = None if labels is None else _Call(self)
        self.calls.append(call)
        try:
            output = inner(*args, **kwargs)
        finally:
            self.calls.pop()
            if call is not None:
                call.stack.close()
        if call is None:
            return output
        if not call.num_losses and (model.training or call.made):
            reason = "is compiled, or does not compute its loss as a cross-entropy of its head's output"
            raise ValueError(self.refusal(reason, "Compile its blocks alone, or leave ChunkedLoss out for this model."))
        self.num_losses += call.num_losses if torch.is_grad_enabled() else 0
        if isinstance(output, tuple):
            return tuple(_Unread(call, value).read() if call.is_stand_in(value) else value for value in output)
        unread = {name: value for name, value in output.items() if call.is_stand_in(value)}
        for name, value in unread.items():
            output[name] = _Unread(call, value)
        if unread:
            kind: Any = type(output)
            output.__class__ = _with_unread(kind, frozenset(unread))
        return output

    def _run_head(self, inner: Callable[..., Any], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor that stands for the logits where a loss is computed."""
        call = next((one for one in reversed(self.calls) if one is not None), None)
        if call is None or call.made or torch.compiler.is_compiling() or not isinstance(hidden, Tensor):
            return inner(hidden, *args, **kwargs)
        return call.begin(hidden)

    def refusal(self, reason: str, fix: str = "Leave ChunkedLoss out for this model.") -> str:
        """A sentence that names the model."""
        return f"ChunkedLoss: {self.name} {reason}. {fix}"


class _Call(TorchFunctionMode):
    """From a model's head to its loss: what the model does to its logits is noted, and done to a chunk at a time.

    The head's output is stood for by a zero that is expanded to the shape of the logits, and takes no memory.
    """

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__()
        self.head = head
        self.stack = ExitStack()
        self.num_losses = 0
        self.made: list[tuple[Tensor, int]] = []
        """Tensors that stand for logits, and how many steps led to them."""
        self.steps: list[Callable[[Tensor], Tensor]] = []
        """What was done to them, as functions of `(tokens, classes)`."""

    def is_stand_in(self, value: Any) -> bool:
        """Whether a value stands for logits."""
        return any(value is one for one, _ in self.made)

    def begin(self, hidden: Tensor) -> Tensor:
        """Return what stands for the head's output of `hidden`, `(..., width)`."""
        self.hidden = hidden if hidden.ndim == 3 else hidden.reshape(1, -1, hidden.shape[-1])
        head: Any = self.head.head
        self.weight, self.bias = head.weight, head.bias  # read once: spectral norm changes with each reading
        self.with_gradients = torch.is_grad_enabled()
        device = hidden.device.type
        self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dtype = hidden.dtype if self.autocast is None or hidden.dtype is torch.float64 else self.autocast
        self.stack.enter_context(self)
        return self._stand_in((*hidden.shape[:-1], self.weight.shape[0]), dtype)

    def _stand_in(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.made.append((self.hidden.new_zeros((), dtype=dtype).expand(*shape), len(self.steps)))
        return self.made[-1][0]

    def changed(self, logits: Tensor, num_steps: int) -> Tensor:
        """Logits of `(tokens, classes)`, after so many of the steps."""
        for step in self.steps[:num_steps]:
            logits = step(logits)
        return logits

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = next((i for i, value in enumerate(args) if self.is_stand_in(value)), None)
        if place is None and not any(self.is_stand_in(leaf) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if place is not None and (func in _ASKS or name in _ASKING):
            return func(*args, **kwargs)
        if place == 0 and name in _RESHAPING:
            found = func(*args, **kwargs)
            if found.shape[-1:] == args[0].shape[-1:] and found.numel() == args[0].numel():
                return self._stand_in(found.shape, found.dtype)
        elif place is not None and name in _PER_TOKEN:
            return self._per_token(func, place, args, kwargs)
        raise ValueError(
            self.head.refusal(f"applies `{name}` to its logits before the loss, which can't be done in chunks")
        )

    def _per_token(self, func: Any, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Note what is done to each token's logits alone: a cast, a scale, a soft cap, a bias of the classes."""
        logits = args[place]
        others = [leaf for leaf in tree_leaves((args[:place], args[place + 1 :], kwargs)) if isinstance(leaf, Tensor)]
        if any(math.prod(other.shape[:-1]) != 1 for other in others):
            raise ValueError(self.head.refusal("changes its logits by other values for each token"))
        if any(other.requires_grad for other in others):
            raise ValueError(self.head.refusal(f"applies `{func.__name__}` with a trained parameter to its logits"))

        def step(rows: Tensor) -> Tensor:
            wide = rows.reshape(*[1] * (logits.ndim - 2), -1, rows.shape[-1])
            found: Tensor = func(*args[:place], wide, *args[place + 1 :], **kwargs)
            return found.reshape(-1, found.shape[-1])

        with torch.no_grad():
            sample = step(logits.new_zeros(1, logits.shape[-1]))
        is_cast = func in _CASTS and sample.dtype in (torch.float32, torch.float64)
        if not is_cast:  # the loss is computed in float32 at least
            self.steps.append(step)
        return self._stand_in((*logits.shape[:-1], sample.shape[-1]), sample.dtype)

    def _cross_entropy(
        self,
        input: Any,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """`F.cross_entropy` in chunks; 0 where no token counts, and not NaN."""
        hidden = self.hidden
        fits = input.ndim == 2 and target.ndim == 1 and target.numel() == math.prod(hidden.shape[:2])
        if not fits or weight is not None or reduction not in ("mean", "sum") or size_average is not None or reduce:
            asked = "weight=..." if weight is not None else f"reduction={reduction!r}, shape {tuple(target.shape)}"
            raise ValueError(self.head.refusal(f"applies `cross_entropy({asked})` to its logits"))
        self.num_losses += 1
        labels = target.to(hidden.device, torch.long).view(hidden.shape[:2])
        change = partial(self.changed, num_steps=len(self.steps)) if self.steps else None
        total = linear_cross_entropy(
            hidden,
            _gathered(self.weight),
            labels,
            _gathered(self.bias),
            ignore_index,
            self.head.num_chunks,
            label_smoothing,
            change,
        )
        if reduction == "mean":
            total = total / (labels != ignore_index).sum().clamp(min=1)
        is_autocast = torch.is_autocast_enabled(hidden.device.type)
        return total.to(torch.promote_types(input.dtype, torch.float32) if is_autocast else input.dtype)


_ASKS = {
    vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda")
}
_ASKING = {"size", "dim", "numel", "is_floating_point", "__len__", "get_device", "stride"}
_RESHAPING = {"view", "reshape", "flatten", "contiguous"}
_CASTS = {Tensor.float, Tensor.to, Tensor.double, Tensor.type_as}
_PER_TOKEN = {
    *("float", "to", "double", "type_as", "tanh", "log_softmax"),
    *("add", "sub", "mul", "div", "true_divide", "multiply", "divide"),
    *("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"),
}
"""Functions that treat every token alike, if their other operands do."""


class _Unread:
    """Logits in the output of a model, which are computed as the model would have if they are read."""

    def __init__(self, call: _Call, stand_in: Tensor) -> None:
        self.call, self.shape, self.dtype = call, stand_in.shape, stand_in.dtype
        self.num_steps = next(number for one, number in call.made if one is stand_in)
        self.time = call.head.num_updates

    def read(self) -> Tensor:
        """Compute them."""
        if self.call.head.num_updates != self.time:
            raise RuntimeError(
                "ChunkedLoss: logits are read after the optimizer's step, whose weights would give others. Read "
                "them (`output.logits`) in the step, or leave ChunkedLoss out."
            )
        call, rows = self.call, self.call.hidden.flatten(0, 1)
        cast = torch.autocast(rows.device.type, dtype=call.autocast, enabled=call.autocast is not None)
        with cast, torch.set_grad_enabled(call.with_gradients):
            logits = call.changed(F.linear(rows, _gathered(call.weight), _gathered(call.bias)), self.num_steps)
        return logits.view(self.shape).to(self.dtype)


@functools.cache
def _with_unread(kind: Any, unread: frozenset[str]) -> Any:
    """A class of a model's output that computes logits when they are read.

    They are no fields of it as a data class: FSDP2 reads all fields of what its root module returns.
    """

    def read(output: Any, name: str, value: Any) -> Any:
        if isinstance(value, _Unread):
            output[name] = value = value.read()
        return value

    class Output(kind):  # type: ignore[misc]
        @override
        def __getattribute__(self, name: str) -> Any:
            return read(self, name, super().__getattribute__(name))

        @override
        def __getitem__(self, key: Any) -> Any:
            key = list(self.keys())[key] if isinstance(key, int) else key
            return read(self, key, super().__getitem__(key))

    fields = getattr(kind, "__dataclass_fields__", {})
    Output.__dataclass_fields__ = {name: field for name, field in fields.items() if name not in unread}
    Output.__name__, Output.__qualname__, Output.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Output


def _gathered(parameter: Any) -> Any:
    """A parameter of the head, whole where a strategy has divided it since."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _at_least_one(num_items: Any, labels: Tensor) -> Any:
    """Divide a sum over no tokens by 1, not by 0."""
    if not isinstance(num_items, Tensor):
        return 1 if num_items == 0 and not bool((labels != -100).any()) else num_items
    return num_items + ((num_items == 0) & ~(labels != -100).any().to(num_items.device)).to(num_items.dtype)


_NO_MODEL = (
    "holds no Hugging Face causal language model or encoder-decoder (PreTrainedModel) with one linear output head. A "
    "head of several layers, as an `nn.Sequential`, isn't served. Leave ChunkedLoss out, or call "
    "`linear_cross_entropy` yourself."
)


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if the loss can be computed in chunks."""
    if run.zero_3:
        where = "outside the head, where ZeRO-3 has put it away"
        return f"it uses the head's weight {where}. Use `memfit_zero_2` or `memfit_fsdp2`."
    if run.callbacks.count("ChunkedLoss") > 1:
        return "it is listed twice in the trainer's callbacks. Leave one out."
    if run.facts.causal_lm is False:
        return f"the module {_NO_MODEL}"
    return None


_KERNELS_PER_CHUNK = 15


def _cost(profile: "ModelProfile", options: Options) -> Cost:
    return Cost(micro_batch=Work(kernels=_KERNELS_PER_CHUNK * int(options.get("num_chunks", 8))))


TECHNIQUE = Technique(
    name="chunked_loss",
    kind="loss",
    summary="computes a language model's loss, also an encoder-decoder's, without the logits ever being whole",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.chunked_loss.ChunkedLoss"),),
    unsupported=unsupported,
    cost=_cost,
    changes_step=False,
)
