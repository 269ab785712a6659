"""`ChunkedLoss`: the loss of a Hugging Face language model, computed without ever holding all logits."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn import Linear  # the class itself, which precisions of Lightning replace in `torch.nn` for a while
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_memfit.memory.wrapping import own_attribute, wrap_method
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run, is_causal_lm
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.lazy_logits import HeadCall, is_freed, whole_in_functions

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile


class ChunkedLoss(TechniqueCallback):
    """Compute head and cross-entropy together in chunks, wherever one is taken of a language model's logits.

    Logits are made whole where anything else reads them. Loss and gradients are exact up to the order of additions, but
    a batch in which no token counts has the loss 0, where torch has NaN.

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
        self._heads: list[_ChunkedHead] = []
        self._has_begun = False

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap heads once the module is complete.

        Raises:
            MisconfigurationException: If it is listed twice, or under ZeRO-3, which gathers the head's weight only
                while the head itself runs.
        """
        if sum(isinstance(callback, ChunkedLoss) for callback in getattr(trainer, "callbacks", [])) > 1:
            raise MisconfigurationException("ChunkedLoss is listed twice in the trainer's callbacks. Leave one out.")
        if getattr(trainer.strategy, "zero_stage_3", False):
            raise MisconfigurationException(f"ChunkedLoss: {_ZERO_3}")

        def wrap_heads() -> None:
            models = find_causal_models(pl_module)
            wrapped = {id(head.head) for head in self._heads}  # WeightAveraging calls `configure_model` once more
            for group in _by_head([model for model in models if id(model.get_output_embeddings()) not in wrapped]):
                self._heads.append(_ChunkedHead(group, self.num_chunks))
                self.on_restore(self._heads[-1].restore)
            self.announce(f"loss of {', '.join(type(model).__name__ for model in models)} computed in chunks")

        self._has_begun = False
        self.on_restore(self._heads.clear)
        self.when_complete(pl_module, wrap_heads)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Say so if the first batch had no loss of logits at all."""
        if self._heads and not self._has_begun and not any(head.num_losses for head in self._heads):
            rank_zero_warn(
                f"ChunkedLoss: no loss was computed in chunks, as {type(pl_module).__name__} is compiled or took "
                "no cross-entropy of the logits of a Hugging Face model. Leave ChunkedLoss out if it never does."
            )
        self._has_begun = True

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Refuse a module that makes logits for something else than a loss that can be had in chunks."""
        for head in self._heads:
            head.check_served()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Make logits whole that outlive the step; with manual optimization all may, so that reading them is an error.

        A step that returns its logits, or stores them, may have them read when the weights are others.
        """
        for head in self._heads:
            head.end_calls(keep=pl_module.automatic_optimization)


def find_causal_models(module: nn.Module) -> list[Any]:
    """Hugging Face language models in a module.

    Raises:
        ValueError: If there is none.
    """
    models = [child for child in module.modules() if is_causal_lm(child)]
    if not models:
        raise ValueError(f"{type(module).__name__} {_NO_MODEL}")
    return models


def chunk_loss(model: Any, num_chunks: int = 8) -> Callable[[], None]:
    """Make a Hugging Face language model compute its loss in chunks, and return a function that undoes this."""
    return _ChunkedHead([model], num_chunks).restore


def _by_head(models: Sequence[Any]) -> list[list[Any]]:
    """Group models that share a head, as an encoder-decoder does with its decoder."""
    groups: dict[int, list[Any]] = {}
    for model in models:
        groups.setdefault(id(model.get_output_embeddings()), []).append(model)
    return list(groups.values())


@dataclass
class _Call:
    """A running call of a model."""

    model: Any
    has_labels: bool
    num_losses: int = 0


class _ChunkedHead:
    """A head whose output is lazy, and the models that call it."""

    def __init__(self, models: Sequence[Any], num_chunks: int) -> None:
        self.name = type(models[0]).__name__
        self.num_chunks = num_chunks
        self.head: nn.Module = models[0].get_output_embeddings()
        self.calls: list[_Call] = []
        self.made: list[weakref.ref[HeadCall]] = []
        self.num_lazy = 0
        self.num_losses = 0
        self.is_compared = False
        self.has_warned = False
        self.last_reader = ""
        kind = type(self.head)
        kind = kind.__mro__[1] if is_parametrized(self.head) else kind  # torch gives it a class of its own
        self.is_plain = kind is Linear and own_attribute(self.head, "forward") is None
        self._undo: list[Callable[[], object]] = [
            whole_in_functions(),
            wrap_method(self.head, "forward", self._run_head),
        ]
        for model in models:
            before = _Before(self, inspect.signature(type(model).forward))
            self._undo.append(model.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo.append(model.register_forward_hook(_After(self), always_call=True).remove)

    def restore(self) -> None:
        """Undo all changes."""
        while self._undo:
            self._undo.pop()()

    # --- around the model -------------------------------------------------------------------------------------------

    def end_call(self, model: nn.Module, output: Any) -> None:
        """Refuse a model that took another loss of its logits than one in chunks."""
        if not self.calls:
            return
        call = self.calls.pop()
        if output is None or not call.has_labels or call.num_losses or not (model.training and torch.is_grad_enabled()):
            return
        loss = getattr(output, "loss", None)
        loss = output[0] if loss is None and isinstance(output, tuple) else loss
        if isinstance(loss, Tensor) and loss.requires_grad:
            reason = "is compiled, or does not compute its loss as a cross-entropy of its head's output"
            raise ValueError(
                self._refusal(reason, "Compile its blocks alone, or leave ChunkedLoss out for this model.")
            )

    # --- around the head --------------------------------------------------------------------------------------------

    def _run_head(self, inner: Callable[..., Any], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return lazy logits where they may be for a loss."""
        has_labels = any(call.has_labels for call in self.calls)
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or has_labels):
            return inner(hidden, *args, **kwargs)
        if not isinstance(hidden, Tensor) or hidden.ndim == 0 or hasattr(hidden, "full_tensor") or not hidden.numel():
            return inner(hidden, *args, **kwargs)
        linear = self.head if self.is_plain and isinstance(self.head, Linear) else None
        # Read once, as a plain call would: spectral norm and the like change with each.
        weights: tuple[Tensor | None, Tensor | None] = (None, None)
        if linear is not None:
            weight = linear.weight
            if _is_known(weight):
                weights = weight, linear.bias
            else:
                linear = None
        learns = torch.is_grad_enabled() and self.head.training
        if learns:
            self._check_head(linear)
        parameters = [p for p in weights if p is not None] if linear is not None else list(self.head.parameters())
        seen = [(module._parameters, dict(module._parameters)) for module in self.head.modules()]
        buffers = [(buffer, buffer._version) for buffer in self.head.buffers() if learns and not buffer.is_inference()]

        def run(rows: Tensor) -> Tensor:
            with _holding(seen):
                logits: Tensor = inner(rows, *args, **kwargs)
            if any(buffer._version != version for buffer, version in buffers):
                raise ValueError(
                    self._refusal(
                        f"has a head ({type(self.head).__name__}) that changes its buffers each time it runs, and "
                        "that would run once per chunk"
                    )
                )
            return logits

        call = HeadCall(
            run,
            hidden,
            linear,
            weights,
            parameters,
            self.num_chunks,
            self._on_whole,
            self._on_loss,
        )
        self.num_lazy += learns
        self.made = [made for made in self.made if made() is not None]
        self.made.append(weakref.ref(call))
        return call.lazy()

    def end_calls(self, keep: bool) -> None:
        """Compute no logits of the head's calls up to here any more; first make those that are kept whole."""
        calls = [call for call in (made() for made in self.made) if call is not None]
        was_kept = [call.end(keep) for call in calls]
        self.made.clear()
        if any(was_kept) and not self.has_warned:
            self.has_warned = True
            rank_zero_warn(
                f"ChunkedLoss: logits of {self.name} are kept beyond the step, so that they exist whole. Numbers are "
                "right, but memory is not saved: keep, or return, what is computed of them."
            )

    def _check_head(self, linear: nn.Linear | None) -> None:
        """Refuse a head whose output in chunks is not its output.

        Raises:
            ValueError: If its gradient is hooked, it draws random numbers, or it is divided among ranks.
        """
        head = self.head
        if head._backward_hooks or head._backward_pre_hooks:
            raise ValueError(self._refusal("has a head with hooks on its gradients, which never exist"))
        if linear is not None:
            return
        for part in head.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
                raise ValueError(
                    self._refusal(
                        f"has a head with dropout ({part.p}), which would differ in chunks",
                        "Adapt all but the head, set the dropout to 0, or leave ChunkedLoss out.",
                    )
                )
        if any(hasattr(parameter, "full_tensor") for parameter in head.parameters()):
            raise ValueError(self._refusal(f"has a {type(head).__name__} for a head, divided among ranks"))

    def _on_whole(self, call: HeadCall, reader: str) -> None:
        """Called before logits are made whole."""
        if not (call.with_gradients and self.head.training):
            return
        self.last_reader = reader
        if any(running.has_labels for running in self.calls):
            raise ValueError(
                self._refusal(
                    f"applies `{reader}` to its logits before the loss, which can't be done in chunks", _way_out(reader)
                )
            )
        if not self.has_warned:
            self.has_warned = True
            rank_zero_warn(
                f"ChunkedLoss: `{reader}` reads the logits of {self.name} while training, so that they exist whole. "
                "Numbers are right, but memory is not saved: read them in `validation_step` alone."
            )

    def _on_loss(self, call: HeadCall, difference: Callable[[], str | None]) -> None:
        """Called when a loss was computed; compare the first with plain torch, on a few tokens."""
        self.num_losses += call.with_gradients and self.head.training
        for running in self.calls:
            running.num_losses += 1
        if self.is_compared or not call.with_gradients or not _has_values(call.hidden):
            return
        found = difference()
        if found:
            raise ValueError(
                self._refusal(f"has a head ({type(self.head).__name__}) whose output in chunks is another: {found}")
            )
        self.is_compared = found is not None

    def check_served(self) -> None:
        """Refuse to train if all logits were made, and no loss in chunks.

        Raises:
            MisconfigurationException: If so.
        """
        if self.num_lazy and not self.num_losses and self.last_reader:
            raise MisconfigurationException(
                self._refusal(
                    f"is not trained on a cross-entropy of its logits that can be had in chunks "
                    f"(`{self.last_reader}` read them whole)",
                    _way_out(self.last_reader),
                )
            )

    def _refusal(self, reason: str, fix: str = "Leave ChunkedLoss out for this model.") -> str:
        return f"ChunkedLoss: {self.name} {reason}. {fix}"


def _way_out(reader: str) -> str:
    """What to do about what makes logits whole."""
    leave = "leave ChunkedLoss out for this model."
    name = reader.removeprefix("aten.")
    if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE:
        return f"Write it out of place (`logits = logits + bias`, not `logits += bias`), or {leave}"
    if name in _SCALES:
        return f"Apply a factor of each token to the head's input instead, or {leave}"
    return f"L{leave[1:]}"


_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__setitem__")
_SCALES = ("mul", "div", "true_divide", "multiply", "divide", "__mul__", "__rmul__", "__truediv__")


class _Idle:
    """What the hooks on a model are in a copy of it: nothing."""

    def __call__(self, *args: Any) -> None:
        return None


class _After:
    """Notes that a model's call is over."""

    def __init__(self, head: _ChunkedHead) -> None:
        self.head = head

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.head.end_call(model, output)

    @override
    def __reduce__(self) -> Any:
        return _Idle, ()


class _Before:
    """Notes that a model is called, and whether with labels."""

    @override
    def __reduce__(self) -> Any:
        return _Idle, ()

    def __init__(self, head: _ChunkedHead, signature: inspect.Signature) -> None:
        self.head = head
        self.signature = signature

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self.signature.bind_partial(model, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        labels = given.get("labels")
        self.head.calls.append(_Call(model, labels is not None))
        items = kwargs.get("num_items_in_batch")
        if not isinstance(labels, Tensor) or items is None:
            return None
        return args, {**kwargs, "num_items_in_batch": _at_least_one(items, labels)}


def _at_least_one(num_items: Any, labels: Tensor) -> Any:
    """Divide a sum over no tokens by 1, not by 0."""
    if not isinstance(num_items, Tensor):
        return 1 if num_items == 0 and not bool((labels != -100).any()) else num_items
    return num_items + ((num_items == 0) & ~(labels != -100).any().to(num_items.device)).to(num_items.dtype)


@contextmanager
def _holding(seen: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Put parameters in place as a call saw them, as `torch.func.functional_call` may have put others for it alone."""
    changed = []
    for owner, parameters in seen:
        for name, parameter in parameters.items():
            now = owner.get(name)
            if now is not parameter and not (parameter is None or hasattr(now, "full_tensor") or is_freed(parameter)):
                changed.append((owner, name, now))
                owner[name] = parameter
    try:
        yield
    finally:
        for owner, name, now in changed:
            owner[name] = now


def _is_known(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor, perhaps divided among ranks or fake, and not quantized."""
    if type(weight) is Tensor or type(weight.data) is Tensor:
        return True
    return type(weight) is nn.Parameter or hasattr(weight, "full_tensor") or not _has_values(weight)


def _has_values(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


_ZERO_3 = (
    "it uses the head's weight outside the head, where ZeRO-3 has put it away. Use `memfit_zero_2` or `memfit_fsdp2`, "
    "or leave ChunkedLoss out."
)

_NO_MODEL = (
    "holds no Hugging Face causal language model or encoder-decoder (PreTrainedModel) with one linear output head. A "
    "head of several layers, as an `nn.Sequential`, isn't served. Leave ChunkedLoss out, or call "
    "`linear_cross_entropy` yourself."
)


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if the loss can be computed in chunks."""
    if run.zero_3:
        return _ZERO_3
    if run.facts.causal_lm is False:
        return f"the module {_NO_MODEL}"
    return None


def _cost(profile: "ModelProfile", options: Options) -> Cost:
    return Cost(micro_batch=Work(kernels=_KERNELS_PER_CHUNK * int(options.get("num_chunks", 8))))


_KERNELS_PER_CHUNK = 15

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
