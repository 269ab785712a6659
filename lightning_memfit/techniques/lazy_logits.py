"""`LazyLogits`: a tensor that stands for a head's output, of which cross-entropy takes one chunk at a time.

Every operator on such a tensor is one of three. It chooses or rearranges tokens, which is done to their numbers alone;
or it treats every token alike (a cast, a scale, a soft cap, a bias), which is noted and done to a chunk at a time; or
it needs the logits, which are then computed as the head would have, with the same graph. So nothing is assumed about
the program between head and loss: what isn't known to be exact in chunks is done whole.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_memfit.techniques.linear_cross_entropy import (
    chunked_cross_entropy,
    linear_cross_entropy,
    saved_here,
    token_cross_entropy,
)

_ATEN = torch.ops.aten
_Step = Callable[[Tensor], Tensor]
"""What is done to `(tokens, classes)`."""


class LogitsNeeded(RuntimeError):
    """An operator needs the values of lazy logits. Caught where torch's function was called, which is then repeated."""

    def __init__(self, operator: str, changes: bool) -> None:
        super().__init__(
            f"`{operator}` reaches the logits past torch's Python functions, where ChunkedLoss can't provide them. Use "
            "`torch.clone(logits) + 0` there, or leave ChunkedLoss out."
        )
        self.operator = operator
        self.changes = changes


class LogitsChanged(RuntimeError):
    """Logits can't be computed any more: what they are computed from has changed."""


class HeadCall:
    """One call of a head: its input, and how to compute its output.

    Args:
        head: What computes logits, called with `(..., width)`.
        hidden: The input.
        linear: The head if it is a plain linear layer, whose weight can be used directly.
        weights: Its weight and bias as its call sees them, which `torch.func.functional_call`, hooks and
            parametrizations make.
        parameters: The head's parameters, or these.
        num_chunks: See `linear_cross_entropy`.
        on_whole: Called with the name of an operator before the logits are computed for it.
        on_loss: Called when a loss was computed in chunks.
    """

    def __init__(
        self,
        head: Callable[[Tensor], Tensor],
        hidden: Tensor,
        linear: nn.Linear | None,
        weights: tuple[Any, Any],
        parameters: Sequence[Tensor],
        num_chunks: int,
        on_whole: Callable[[HeadCall, str], None],
        on_loss: Callable[[HeadCall, Callable[[], str | None]], None],
    ) -> None:
        self.hidden = hidden
        self.linear = linear
        self.parameters = parameters
        self.num_chunks = num_chunks
        self.on_whole = on_whole
        self.on_loss = on_loss
        self.with_gradients = torch.is_grad_enabled()
        self.is_changed = False
        self.is_over = False
        self.made: list[weakref.ref[LazyLogits]] = []
        self._head = head
        self._weights = weights
        device = hidden.device.type
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._versions = _versions((hidden, *parameters))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast as it was when the head was called."""
        enabled = self._autocast is not None
        with torch.autocast(self.hidden.device.type, dtype=self._autocast, enabled=enabled):
            yield

    def weights(self) -> tuple[Any, Any]:
        """Weight and bias as the head's call saw them; gathered where a strategy has divided or freed them since."""
        assert self.linear is not None
        seen = zip(("weight", "bias"), self._weights, strict=True)
        weight, bias = (_gathered(self.linear._parameters.get(name), value) for name, value in seen)
        return weight, bias

    def run(self, hidden: Tensor) -> Tensor:
        """Apply the head as it would have been applied in its call."""
        with self.autocast():
            if self.linear is not None:
                return F.linear(hidden, *self.weights())
            return self._head(hidden)

    def lazy(self) -> LazyLogits:
        """The output."""
        with torch.no_grad():
            width = self.hidden.shape[-1]
            if self.linear is not None:
                cast = self._autocast is not None and self.hidden.dtype is not torch.float64
                classes, dtype = self._weights[0].shape[0], self._autocast if cast else self.hidden.dtype
            else:
                sample = self.run(self.hidden.reshape(-1, width)[:1])
                if not isinstance(sample, Tensor) or sample.ndim != 2 or len(sample) != 1:
                    raise ValueError("ChunkedLoss: the head doesn't return one row of logits per token. Leave it out.")
                classes, dtype = sample.shape[1], sample.dtype
            shape = self.hidden.shape[:-1]
            places = torch.arange(math.prod(shape), device=self.hidden.device).view(*shape, 1)
        learns = self.with_gradients and (self.hidden.requires_grad or any(p.requires_grad for p in self.parameters))
        anchor = self.hidden if self.hidden.requires_grad else torch.empty(0, requires_grad=learns)
        whole: LazyLogits = _Anchored.apply(anchor, self, places, classes, dtype)  # type: ignore[no-untyped-call]
        whole.expects_gradient = learns
        return whole

    def end(self, keep: bool) -> bool:
        """Compute nothing from now on, as weights change; say whether logits were made whole to be read later.

        Versions don't tell: an optimizer may write to `parameter.data`.
        """
        alive = [
            lazy for lazy in (reference() for reference in self.made) if lazy is not None and lazy.held.whole is None
        ]
        for lazy in alive if keep and not self.is_over else ():
            with suppress(LogitsChanged):  # which whoever reads them is told
                lazy.whole()
        self.is_over = True
        return any(lazy.held.whole is not None for lazy in alive)

    def check_unchanged(self) -> None:
        """Refuse to compute logits, or a loss, from tensors that are no longer what they were.

        Raises:
            LogitsChanged: If an input of the head was changed in place or freed, or an optimizer's step has begun.
        """
        changed = self.is_over
        for tensor, version in self._versions:
            changed |= is_freed(tensor)
            changed |= _version(tensor) != version
        if changed:
            raise LogitsChanged(
                "ChunkedLoss: logits are read after the head's input or weight was changed or freed. Read them "
                "before the optimizer's step, or leave ChunkedLoss out."
            )


class _Held:
    """The logits of a `LazyLogits` once they exist, and how they are made; what is detached from it shares them.

    Attributes:
        origin: What they are made of, and how; None for the head's own output.
        whole: The logits.
        learns: Whether they are made with a graph; None as long as nothing has been detached, which tells.
    """

    def __init__(self, origin: tuple[LazyLogits, _Step] | None) -> None:
        self.origin = origin
        self.whole: Tensor | None = None
        self.learns: bool | None = None


class LazyLogits(Tensor):
    """Logits that don't exist: tokens chosen from a head's input, and what is to be done to each token's logits."""

    call: HeadCall
    places: Tensor
    """Number of each token in the head's input. It has the logits' shape, with one class."""
    class_dim: int
    steps: tuple[_Step, ...]
    extras: tuple[Tensor, ...]
    """Tensors with gradients that the steps use."""
    held: _Held
    shares: bool
    """Whether it is detached from the one whose logits these are."""
    expects_gradient: bool
    """Whether gradients would flow to it if its history were never detached."""
    is_attached: bool
    """Whether nothing was detached on the way."""

    @staticmethod
    def make(
        call: HeadCall,
        index: Tensor,
        class_dim: int,
        num_classes: int,
        dtype: torch.dtype,
        steps: tuple[_Step, ...] = (),
        origin: tuple[LazyLogits, _Step] | None = None,
    ) -> LazyLogits:
        """Make one without history."""
        shape = [num_classes if dim == class_dim else size for dim, size in enumerate(index.shape)]
        lazy: LazyLogits = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=index.device)
        lazy.call, lazy.places, lazy.class_dim, lazy.steps, lazy.held = call, index, class_dim, steps, _Held(origin)
        lazy.extras, lazy.expects_gradient, lazy.is_attached, lazy.shares = (), False, True, False
        call.made.append(weakref.ref(lazy))
        return lazy

    def whole(self) -> Tensor:
        """The logits themselves, with the graph they would have."""
        held = self.held
        if held.whole is None:
            if held.origin is None:
                self.call.check_unchanged()
                with torch.set_grad_enabled(self.call.with_gradients):
                    held.whole = self.call.run(self.call.hidden)
            else:
                parent, replay = held.origin
                value, learns = parent.whole(), self.requires_grad if held.learns is None else held.learns
                with torch.set_grad_enabled(learns), torch.autocast(self.device.type, enabled=False):
                    held.whole = replay(value)
        return held.whole.detach() if self.shares else held.whole

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the tensors that it holds, for what counts memory."""
        return ["places"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Tensor:
        """Refuse: it is not to be taken apart."""
        raise NotImplementedError("Lazy logits can't be compiled. Leave ChunkedLoss out.")

    @override
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        loss = _LOSSES[func](*args, **kwargs) if func in _LOSSES else None
        if loss is not None:
            return loss
        name = getattr(func, "__name__", str(func))
        obstacle = _obstacle(*args, **kwargs) if func in _LOSSES and args else None
        name = f"{name}({obstacle})" if obstacle else name
        if func in _READING or name in _READING_NAMES:
            return _on_whole(func, name, args, kwargs)
        if name in _HOOKING and not _is_distributed(args[1:]):
            raise ValueError(f"ChunkedLoss: `{name}` needs the gradient of logits, which never exist. Leave it out.")
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except LogitsNeeded as needed:
            return _on_whole(func, name, args, kwargs, needed.changes)

    @override
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        child = None if func._schema.is_mutable else _derived(func, args, kwargs)
        if child is None:
            raise LogitsNeeded(func._schema.name.replace("::", "."), func._schema.is_mutable)
        return child


class _Anchored(torch.autograd.Function):
    """Lazy logits that have a history, so that torch records what is done to them as usual."""

    @staticmethod
    @override
    def forward(
        ctx: Any, anchor: Tensor, call: HeadCall, index: Tensor, num_classes: int, dtype: torch.dtype
    ) -> Tensor:
        return LazyLogits.make(call, index, index.ndim - 1, num_classes, dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise RuntimeError("A gradient reached logits that ChunkedLoss never computed. Leave ChunkedLoss out.")


_guards = 0


def whole_in_functions() -> Callable[[], None]:
    """Make lazy logits whole before any `torch.autograd.Function` gets them, until the function returned is called.

    Its forward would see operators that leave them lazy, and its backward, which may do anything, would be left out.
    `Function.apply` looks this method up in each call, so that an `apply` that someone has kept is guarded as well.
    """
    global _guards
    if not _guards:
        setattr(_SingleLevelFunction, "apply", classmethod(_apply_to_whole))  # noqa: B010
    _guards += 1

    def undo() -> None:
        global _guards
        _guards -= 1
        if not _guards:
            delattr(_SingleLevelFunction, "apply")

    return undo


def _apply_to_whole(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    if any(isinstance(leaf, LazyLogits) for leaf in (*args, *kwargs.values())):
        return _on_whole(apply, f"{cls.__name__}.apply", args, kwargs)
    return apply(*args, **kwargs)


def _gathered(now: Any, seen: Any) -> Any:
    """A parameter as a call saw it. Tensor parallelism and FSDP2 divide it while its module doesn't run."""
    if hasattr(now, "full_tensor"):
        return now.full_tensor()
    return seen if now is None or not is_freed(seen) else now


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory has been taken away."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def _on_whole(func: Any, name: str, args: Any, kwargs: Any, changes: bool = False) -> Any:
    """Call a function with the logits themselves."""
    lazies = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
    changes |= name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
    for lazy in lazies:
        if lazy.held.whole is None:
            lazy.call.on_whole(lazy.call, name)
        for reference in lazy.call.made if changes else ():
            relative = reference()
            if relative is not None:
                relative.whole()  # as it is before the change, or a view of what changes
        lazy.call.is_changed |= changes
    args, kwargs = tree_map(lambda leaf: leaf.whole() if isinstance(leaf, LazyLogits) else leaf, (args, kwargs))
    before = [_version(lazy.whole()) for lazy in lazies]
    result = func(*args, **kwargs)
    if not changes and before != [_version(lazy.whole()) for lazy in lazies]:
        raise ValueError(f"ChunkedLoss: `{name}` changes logits in place. Use a function that returns others.")
    return result


# --- operators that leave logits lazy ---------------------------------------------------------------------------------


def _derived(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operator to lazy logits, or return None if it needs their values."""
    lazies = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
    if len(lazies) != 1 or lazies[0].call.is_changed:
        return None
    source = lazies[0]
    packet = func.overloadpacket
    if packet in _NEW and args[0] is source:
        return func(source.places.new_empty(0, dtype=source.dtype), *args[1:], **kwargs)
    if packet in _TOKENS and args[0] is source:
        return _TOKENS[packet](source, func, *args[1:], **kwargs)
    if packet in _PER_TOKEN and args[0] is source and args[1] % source.ndim == source.class_dim:
        step = _PerToken(func, args[2:])
        return _stepped(source, func, args, kwargs, step, source.shape[source.class_dim])
    if packet is _ATEN._to_copy:
        dtype, device = kwargs.get("dtype") or source.dtype, kwargs.get("device")
        if device is not None and torch.device(device) != source.device:
            return None
        if dtype in (torch.float32, torch.float64) and not source.steps and source.dtype.is_floating_point:
            # The loss is computed in at least float32 anyway.
            return _child(source, source.places, source.class_dim, dtype, lambda whole: whole.to(dtype, copy=True))
        return _stepped(source, func, args, kwargs, lambda rows: rows.to(dtype), source.shape[source.class_dim])
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _pointwise(source, func, args, kwargs)
    return None


def _child(
    source: LazyLogits,
    index: Tensor,
    class_dim: int,
    dtype: torch.dtype | None = None,
    replay: _Step = lambda whole: whole,
    num_classes: int | None = None,
    steps: tuple[_Step, ...] = (),
    extras: tuple[Tensor, ...] = (),
) -> LazyLogits:
    classes = source.shape[source.class_dim] if num_classes is None else num_classes
    child = LazyLogits.make(
        source.call, index, class_dim, classes, dtype or source.dtype, source.steps + steps, (source, replay)
    )
    learns = [extra for extra in extras if extra.requires_grad]
    child.extras = (*source.extras, *learns)
    child.is_attached = source.is_attached and source.requires_grad == source.expects_gradient
    child.expects_gradient = child.dtype.is_floating_point and (source.expects_gradient or bool(learns))
    return child


def _stepped(
    source: LazyLogits, func: Any, args: Any, kwargs: Any, step: _Step, num_classes: int, extras: Any = ()
) -> LazyLogits | None:
    """The result of an operator that treats every token alike; None if it isn't one tensor of the same shape."""

    def applied(value: Tensor) -> Tensor:
        given = [value if leaf is source else leaf for leaf in args]
        result: Tensor = func(*given, **kwargs)
        return result

    sample = _sample(source)
    given = [sample if leaf is source else leaf for leaf in args]
    result = func(*given, **kwargs)
    if not isinstance(result, Tensor) or result.ndim != source.ndim:
        return None
    return _child(source, source.places, source.class_dim, result.dtype, applied, num_classes, (step,), tuple(extras))


class _PerToken:
    """A step that computes each class from all of them."""

    def __init__(self, func: Any, rest: Sequence[Any]) -> None:
        self.func = func
        self.rest = rest

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = self.func(rows, 1, *self.rest)
        return result


def _sample(source: LazyLogits) -> Tensor:
    return source.places.new_zeros((1,) * source.ndim, dtype=source.dtype)


def _pointwise(source: LazyLogits, func: Any, args: Any, kwargs: Any) -> LazyLogits | None:
    others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not source]
    if not any(leaf is source for leaf in args) or not all(_is_alike(other, source) for other in others):
        return None

    def step(rows: Tensor) -> Tensor:
        def row(leaf: Any) -> Any:
            if leaf is source:
                return rows
            return leaf.reshape(-1) if isinstance(leaf, Tensor) and leaf.ndim else leaf

        result: Tensor = func(*tree_map(row, args), **tree_map(row, kwargs))
        return result

    source.call._versions += _versions(others)
    return _stepped(source, func, args, kwargs, step, source.shape[source.class_dim], others)


def _is_alike(other: Tensor, logits: LazyLogits) -> bool:
    """Whether a tensor that is broadcast against logits is the same for every token."""
    place = logits.class_dim - (logits.ndim - other.ndim)
    sizes = [size for dim, size in enumerate(other.shape) if dim != place]
    classes = other.shape[place] if 0 <= place < other.ndim else 1
    return other.ndim <= logits.ndim and set(sizes) <= {1} and classes in (1, logits.shape[logits.class_dim])


def _same(source: LazyLogits, func: Any, *args: Any, **kwargs: Any) -> LazyLogits:
    return _child(source, source.places, source.class_dim, replay=lambda whole: func(whole, *args, **kwargs))


def _detached(source: LazyLogits, func: Any) -> LazyLogits:
    """Share the logits without holding the source.

    Autograd detaches a result that it saves (of tanh, of a softmax) and hangs it on the result's own graph: if it held
    the result, neither would ever be freed.
    """
    if source.held.origin is None:
        return _same(source, func)
    child = _child(source, source.places, source.class_dim)
    child.held, child.shares = source.held, True
    if not source.shares:
        source.held.learns = source.requires_grad
    return child


def _viewed(source: LazyLogits, func: Any, size: Sequence[int], **kwargs: Any) -> LazyLogits | None:
    shape = list(size)
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = source.numel() // rest if rest else 0
    classes = source.shape[source.class_dim]
    if source.class_dim != source.ndim - 1 or not shape or shape[-1] != classes or math.prod(shape) != source.numel():
        return None
    return _child(source, source.places.reshape(*shape[:-1], 1), len(shape) - 1, replay=lambda whole: whole.view(shape)
                  if whole.is_contiguous() else whole.reshape(shape))  # fmt: skip


def _expanded(source: LazyLogits, func: Any, size: Sequence[int], **kwargs: Any) -> LazyLogits | None:
    unchanged = len(size) == source.ndim and all(n in (-1, m) for n, m in zip(size, source.shape, strict=True))
    return _same(source, func, size, **kwargs) if unchanged else None


def _sliced(
    source: LazyLogits, func: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyLogits | None:
    dim %= source.ndim

    def replay(whole: Tensor) -> Tensor:
        result: Tensor = func(whole, dim, start, end, step)
        return result

    if dim != source.class_dim:
        return _child(source, func(source.places, dim, start, end, step), source.class_dim, replay=replay)
    classes = range(source.shape[dim])[start:end:step]
    if len(classes) == source.shape[dim]:
        return _child(source, source.places, source.class_dim, replay=replay)
    steps: tuple[_Step, ...] = (lambda rows: rows[:, start:end:step],)
    return _child(source, source.places, dim, replay=replay, num_classes=len(classes), steps=steps)


def _selected(source: LazyLogits, func: Any, dim: int, place: int) -> LazyLogits | None:
    dim %= source.ndim
    if dim == source.class_dim:
        return None
    class_dim = source.class_dim - (dim < source.class_dim)
    return _child(source, func(source.places, dim, place), class_dim, replay=lambda whole: func(whole, dim, place))


def _masked(source: LazyLogits, func: Any, indices: Sequence[Tensor | None]) -> LazyLogits | None:
    """Tokens chosen by one mask over the leading dimensions."""
    mask = indices[0]
    if len(indices) != 1 or mask is None or mask.dtype is not torch.bool or mask.ndim > source.class_dim:
        return None
    index = func(source.places, indices)
    return _child(source, index, source.class_dim - mask.ndim + 1, replay=lambda whole: func(whole, indices))


def _turned(source: LazyLogits, func: Any, *args: Any) -> LazyLogits:
    """Dimensions in another order, or ones of size 1 more or fewer."""
    shape = [2 if dim == source.class_dim else 1 for dim in range(source.ndim)]
    class_dim = list(func(torch.empty(shape, device="meta"), *args).shape).index(2)
    return _child(source, func(source.places, *args), class_dim, replay=lambda whole: func(whole, *args))


def _squeezed(source: LazyLogits, func: Any, dim: int) -> LazyLogits | None:
    dim %= source.ndim
    if dim == source.class_dim or source.shape[dim] != 1:
        return None
    return _turned(source, func, dim)


_TOKENS: dict[Any, Callable[..., LazyLogits | None]] = {
    _ATEN.detach: _detached,
    **dict.fromkeys((_ATEN.alias, _ATEN.clone, _ATEN.lift_fresh), _same),
    **dict.fromkeys((_ATEN.view, _ATEN._unsafe_view, _ATEN.reshape), _viewed),
    **dict.fromkeys((_ATEN.transpose, _ATEN.permute, _ATEN.unsqueeze, _ATEN.t), _turned),
    _ATEN.expand: _expanded,
    _ATEN.squeeze: _squeezed,
    _ATEN.slice: _sliced,
    _ATEN.select: _selected,
    _ATEN.index: _masked,
}
_NEW = {_ATEN.new_empty, _ATEN.new_full, _ATEN.new_ones, _ATEN.new_zeros}
_PER_TOKEN = {_ATEN._log_softmax, _ATEN._softmax}
_READING = {vars(torch._C.TensorBase)[name].__get__ for name in ("data", "grad_fn")}
_READING_NAMES = {
    "__array__", "__deepcopy__", "__format__", "__reduce_ex__", "__repr__", "data_ptr", "item", "numpy", "storage",
    "tolist",
}  # fmt: skip
"""Functions that get at values without an operator."""
_HOOKING = {"register_hook", "retain_grad"}


def _is_distributed(hooks: Sequence[Any]) -> bool:
    """Whether hooks are those of FSDP2, which only await the backward pass and watch all outputs."""
    return bool(hooks) and str(getattr(hooks[0], "__module__", "")).startswith("torch.distributed")


# --- losses -----------------------------------------------------------------------------------------------------------


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` in chunks, or None if it can't be had so; no loss where no token counts, and not NaN."""
    if not isinstance(logits, LazyLogits) or not isinstance(target, Tensor) or isinstance(target, LazyLogits):
        return None
    if _obstacle(logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing):
        return None
    if logits.call.is_changed or logits.call.is_over or (logits.requires_grad and not logits.is_attached):
        return None
    _check_labels(target, logits.shape[logits.class_dim], ignore_index)
    call, target = logits.call, target.long()
    call.check_unchanged()
    is_autocast = torch.is_autocast_enabled(logits.device.type)
    dtype = torch.promote_types(logits.dtype, torch.float32) if is_autocast else logits.dtype
    hidden = _in_three(call.hidden)
    placed = target.new_full((math.prod(hidden.shape[:2]),), ignore_index)
    placed = placed.scatter(0, logits.places.reshape(-1), target.reshape(-1)).view(hidden.shape[:2])
    learns = torch.is_grad_enabled() and logits.requires_grad
    with torch.set_grad_enabled(learns), call.autocast():
        parts = _Parts(logits)
        call.on_loss(call, lambda: parts.difference(hidden, placed, ignore_index, label_smoothing))
        if reduction == "none":
            losses = parts.losses(hidden, placed, ignore_index, call.num_chunks, label_smoothing)
            return losses.reshape(-1)[logits.places.reshape(-1)].view(target.shape).to(dtype)
        total = parts.loss(hidden, placed, ignore_index, call.num_chunks, label_smoothing)
        if reduction == "mean":
            total = total / (target != ignore_index).sum().clamp(min=1)
        return total.to(dtype)


def _obstacle(
    logits: Any,
    target: Any = None,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> str | None:
    """The argument because of which a loss can't be had in chunks, as it is written; None if it can."""
    if weight is not None:
        return "weight=..."
    if size_average is not None or reduce is not None:
        return "size_average=..." if size_average is not None else "reduce=..."
    if reduction not in ("mean", "sum", "none"):
        return f"reduction={reduction!r}"
    if not 0.0 <= label_smoothing <= 1.0:
        return f"label_smoothing={label_smoothing}"
    if not isinstance(logits, LazyLogits) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point():
        return "target=<probabilities>"
    tokens = list(logits.shape)
    del tokens[logits.class_dim]
    if list(target.shape) != tokens or logits.class_dim != min(1, logits.ndim - 1):
        return f"input=<{tuple(logits.shape)}>, target=<{tuple(target.shape)}>"
    return None


def _check_labels(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Refuse labels that name no class, as plain torch does; accelerators find them while they compute."""
    if type(target) is not Tensor or target.device.type != "cpu":
        return
    is_wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if is_wrong.any():
        raise IndexError(
            f"ChunkedLoss: the labels (`target` of the loss) hold {int(target[is_wrong][0])}, but the logits have "
            f"{num_classes} classes, 0 to {num_classes - 1} (and {ignore_index} for tokens that don't count). Correct "
            "the labels, or enlarge the vocabulary with `resize_token_embeddings`."
        )


def _negative_log_likelihood(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor | None:
    """`F.nll_loss`: cross-entropy of what is a log-softmax already, of which another changes nothing."""
    is_normalized = isinstance(logits, LazyLogits) and logits.steps and _comes_from_log_softmax(logits)
    if not is_normalized:
        return None
    return _cross_entropy(logits, target, weight, size_average, ignore_index, reduce, reduction)


def _comes_from_log_softmax(logits: LazyLogits) -> bool:
    """Whether the last thing done to the logits was a log-softmax."""
    last = logits.steps[-1]
    return isinstance(last, _PerToken) and last.func.overloadpacket is _ATEN._log_softmax


_LOSSES = {F.cross_entropy: _cross_entropy, F.nll_loss: _negative_log_likelihood}


def _in_three(hidden: Tensor) -> Tensor:
    return (
        hidden if hidden.ndim == 3 else hidden.reshape(hidden.shape[0] if hidden.ndim > 3 else 1, -1, hidden.shape[-1])
    )


class _Parts:
    """What the loss of some lazy logits is computed from."""

    def __init__(self, logits: LazyLogits) -> None:
        self.call = logits.call
        self.steps = logits.steps
        learning = [p for p in (*logits.call.parameters, *logits.extras) if p.requires_grad]
        self.learning = list({id(p): p for p in learning}.values())
        linear = logits.call.linear
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if linear is not None:
            self.weight, self.bias = logits.call.weights()
            seen = map(id, logits.call.parameters)
            swapped: dict[int, Any] = dict(zip(seen, (self.weight, self.bias), strict=False))
            self.learning = [swapped.get(id(p), p) for p in self.learning]

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Logits of `(tokens, width)`."""
        with self.call.autocast():
            logits = self.call.run(hidden) if self.weight is None else F.linear(hidden, self.weight, self.bias)
        with torch.autocast(hidden.device.type, enabled=False):
            for step in self.steps:
                logits = step(logits)
        return logits

    def loss(
        self, hidden: Tensor, target: Tensor, ignore_index: int, num_chunks: int, smoothing: float, learns: bool = True
    ) -> Tensor:
        """Sum over the tokens that count, with gradients of the head if it learns."""
        if self.weight is not None and not self.steps:
            weight, bias = self.weight, self.bias
            if not learns:
                weight, bias = weight.detach(), None if bias is None else bias.detach()
            return linear_cross_entropy(hidden, weight, target, bias, ignore_index, num_chunks, smoothing)
        learning = self.learning if learns else []
        return chunked_cross_entropy(self.logits_of, hidden, learning, target, ignore_index, num_chunks, smoothing)

    def losses(self, hidden: Tensor, target: Tensor, ignore_index: int, num_chunks: int, smoothing: float) -> Tensor:
        """Loss of each token, `(batch, length)`; what weighs on each is known in the backward pass only.

        The logits of a chunk are therefore computed a second time there.
        """
        return token_cross_entropy(self.logits_of, hidden, target, ignore_index, num_chunks, smoothing)

    @torch.enable_grad()
    def difference(self, hidden: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> str | None:
        """How loss and gradient of a few tokens differ from those of plain torch; None if no token counts."""
        places = (target.reshape(-1) != ignore_index).nonzero()[:4, 0]
        if not len(places):
            return None
        few, labels = hidden.detach().reshape(-1, hidden.shape[-1])[places], target.reshape(-1)[places]
        found = []
        for chunked in (True, False):
            inputs = few.clone().requires_grad_()
            with saved_here():
                if chunked:
                    loss = self.loss(inputs[None], labels[None], ignore_index, 2, smoothing, learns=False)
                else:
                    logits = self.logits_of(inputs)
                    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
                (gradient,) = torch.autograd.grad(loss, inputs, allow_unused=True)
            found.append((float(loss.detach()), torch.zeros_like(inputs) if gradient is None else gradient))
        (ours, our_gradient), (plain, gradient) = found
        tolerance = 1e-3 if torch.finfo(logits.dtype).bits > 16 and few.dtype.itemsize > 2 else 5e-2
        if self.call._autocast is not None:
            tolerance = 5e-2
        error = float((our_gradient - gradient).float().norm() / gradient.float().norm().clamp(min=1e-20))
        same = math.isclose(ours, plain, rel_tol=tolerance, abs_tol=tolerance) or not math.isfinite(plain)
        if same and (error <= tolerance or not math.isfinite(error) or float(gradient.norm()) < 1e-6):
            return ""
        return f"loss {ours:.6g} instead of {plain:.6g}, gradients differ by {error:.2%}"


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _versions(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, _version(tensor)) for tensor in tensors]
