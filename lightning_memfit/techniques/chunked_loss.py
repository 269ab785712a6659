"""`ChunkedLoss`: the loss of a Hugging Face causal language model, computed without ever holding all logits."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run, is_causal_lm
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.core.wrapping import wrap_method
from lightning_memfit.techniques.linear_cross_entropy import linear_cross_entropy


class ChunkedLoss(TechniqueCallback):
    """Compute head and loss together in chunks, wherever a causal language model is called with `labels`.

    The model's output is complete except for `logits`, which is then None; without labels nothing changes. Loss and
    gradients are exact up to the order of additions.

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

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap `configure_model`, after which the model is complete.

        Raises:
            MisconfigurationException: Under ZeRO-3, which gathers the head's weight only while the head itself runs.
        """
        if getattr(trainer.strategy, "zero_stage_3", False):
            raise MisconfigurationException(f"ChunkedLoss: {_ZERO_3}")

        def configure(inner: Callable[[], Any]) -> None:
            inner()
            models = find_causal_models(pl_module)
            for model in models:
                self.on_restore(chunk_loss(model, self.num_chunks))
            self.announce(f"loss of {', '.join(type(model).__name__ for model in models)} computed in chunks")

        self.on_restore(wrap_method(pl_module, "configure_model", configure))


def find_causal_models(module: nn.Module) -> list[nn.Module]:
    """Hugging Face causal language models in a module.

    Raises:
        ValueError: If there is none.
    """
    models = [child for child in module.modules() if is_causal_lm(child)]
    if not models:
        raise ValueError(
            f"{type(module).__name__} holds no Hugging Face causal language model (a PreTrainedModel with an "
            "nn.Linear head and the standard loss `ForCausalLMLoss`). Leave ChunkedLoss out, or call "
            "`linear_cross_entropy` yourself."
        )
    return models


def chunk_loss(model: Any, num_chunks: int = 8) -> Callable[[], None]:
    """Make a Hugging Face causal language model compute its loss in chunks, and return a function that undoes this.

    Its head passes on the hidden states, and its loss function takes them as they are. If the model changes them in
    between (logits soft-capped or scaled), an error says so.
    """
    chunked = _ChunkedModel(model, num_chunks)
    hooks = [
        model.register_forward_pre_hook(chunked.before, with_kwargs=True),
        model.register_forward_hook(chunked.after),
    ]
    unwrap = wrap_method(chunked.head, "forward", chunked.run_head)
    had_loss = vars(model).get("_loss_function")
    model._loss_function = chunked.loss  # the attribute behind the setter of `loss_function`

    def restore() -> None:
        for hook in hooks:
            hook.remove()
        unwrap()
        del model._loss_function
        if had_loss is not None:
            model._loss_function = had_loss

    return restore


class _ChunkedModel:
    """State that one model's hooks share during a call."""

    def __init__(self, model: Any, num_chunks: int) -> None:
        self.head: nn.Linear = model.get_output_embeddings()
        self.name = type(model).__name__
        self.whole_loss = model.loss_function
        self.signature = inspect.signature(type(model).forward)
        self.num_chunks = num_chunks
        self.hidden: Tensor | None = None
        self.is_chunking = False
        self.is_done = False

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Chunk the calls that have labels."""
        given = self.signature.bind_partial(model, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        self.is_chunking = given.get("labels") is not None
        self.is_done = False
        if self.is_chunking and given.get("return_dict") is False:
            raise ValueError(
                f"{self.name} was called with `return_dict=False`, but ChunkedLoss has no logits to return. "
            )

    def run_head(self, inner: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Keep the hidden states instead of making logits."""
        if not self.is_chunking:
            return inner(hidden)
        self.hidden = hidden
        return hidden

    def loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        """Replace `ForCausalLMLoss` of transformers."""
        hidden, self.hidden = self.hidden, None
        if not self.is_chunking:
            whole: Tensor = self.whole_loss(logits, labels, vocab_size, **kwargs)
            return whole
        if logits is not hidden:
            raise ValueError(
                f"{self.name} changes its logits between head and loss (soft-capping or scaling), which ChunkedLoss "
                "cannot follow. Leave it out for this model."
            )
        self.is_done = True
        weight, bias = _whole(self.head.weight), _whole(self.head.bias)
        return causal_loss(hidden, labels, weight, bias, self.num_chunks, **kwargs)

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Remove the hidden states from the output's `logits`."""
        if not self.is_chunking:
            return output
        self.is_chunking = False
        if not self.is_done:
            raise ValueError(f"{self.name} did not call its `loss_function`. Leave ChunkedLoss out for this model.")
        return type(output)(**{key: value for key, value in output.items() if key != "logits"})


def _whole(parameter: Any) -> Any:
    """Gather a parameter that tensor parallelism divides while the head doesn't run."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def causal_loss(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_chunks: int = 8,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Loss of next-token prediction, with the arguments of `transformers.loss.loss_utils.ForCausalLMLoss`.

    Args:
        hidden: `(batch, length, width)`, the inputs of the head.
        labels: `(batch, length)`; position t is predicted from t-1.
        weight: Weight of the head, `(vocabulary, width)`.
        bias: Bias of the head.
        num_chunks: See `linear_cross_entropy`.
        num_items_in_batch: Divide the sum by this instead of by the tokens that count.
        ignore_index: Labels that do not count.
        shift_labels: Labels that are shifted already, used instead of `labels`.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(hidden.shape[:2]).to(hidden.device)
    total = linear_cross_entropy(hidden, weight, target, bias, ignore_index, num_chunks)
    if num_items_in_batch is None:
        return total / (target != ignore_index).sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


_ZERO_3 = (
    "it uses the head's weight outside the head, where ZeRO-3 has put it away. Use `memfit_zero_2` or `memfit_fsdp2`, "
    "or leave ChunkedLoss out."
)


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if the loss can be computed in chunks."""
    if run.zero_3:
        return _ZERO_3
    if run.facts.causal_lm is False:
        return (
            "the module holds no Hugging Face causal language model with the standard loss. Leave ChunkedLoss out, or "
            "call `linear_cross_entropy` yourself."
        )
    return None


def _cost(profile: ModelProfile, options: Options) -> Cost:
    return Cost(micro_batch=Work(kernels=_KERNELS_PER_CHUNK * int(options.get("num_chunks", 8))))


_KERNELS_PER_CHUNK = 15

TECHNIQUE = Technique(
    name="chunked_loss",
    kind="loss",
    summary="computes a causal language model's loss without the logits ever being whole",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.chunked_loss.ChunkedLoss"),),
    unsupported=unsupported,
    cost=_cost,
    changes_step=False,
)
