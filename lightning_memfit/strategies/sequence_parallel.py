"""Sequence parallelism: neighbouring ranks train on the same samples, each on its part of their tokens.

Everything in a transformer but attention treats a token by itself, so that activations per rank shrink with the number
of ranks. In attention each rank computes some heads over whole sequences: queries, keys and values are exchanged before
it and its output after it, as in DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509).

For Hugging Face models of `attn_implementation="sdpa"`, whatever strategy divides their weights. DeepSpeed has the same
as `UlyssesSPAttentionHF`, for its own engine; here two functions are exchanged of torch's and transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_memfit.memory.modes import evaluating
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.strategies.launched import is_traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ATTENTION = "memfit_sequence_parallel"
_IGNORED = -100
"""Label of tokens that don't count, in all models of transformers."""


class DividesSequences:
    """Base of strategies that take `sequence_parallel_size`."""

    sequence_parallel_size = 1
    _divided: SequenceParallel | None = None

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """Give ranks that share sequences the same samples."""
        size = self.sequence_parallel_size
        if size == 1:
            return super().distributed_sampler_kwargs  # type: ignore[misc,no-any-return]
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    def setup(self: Any, trainer: Any) -> None:
        """Divide sequences, then set up as without.

        Raises:
            MisconfigurationException: If the size doesn't divide the ranks, or the module can't be divided.
        """
        size = self.sequence_parallel_size
        if size < 1 or self.world_size % size:
            raise MisconfigurationException(f"`sequence_parallel_size={size}` must divide the {self.world_size} ranks.")
        if size > 1:
            self._divided = SequenceParallel(size, self.global_rank)
            self._divided.attach(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]

    def teardown(self) -> None:
        """Give the module its own way back."""
        if self._divided is not None:
            self._divided.detach()
        super().teardown()  # type: ignore[misc]


class SequencesAlone(DividesSequences, DDPStrategy):
    """Divides sequences and nothing else. What DeepSpeed keeps is worked out from a trace under it.

    Args:
        sequence_parallel_size: Number of neighbouring ranks that share every sequence.
    """

    def __init__(self, sequence_parallel_size: int) -> None:
        super().__init__()
        self.sequence_parallel_size = sequence_parallel_size

    @override
    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class SequenceParallel:
    """Divides sequences among the ranks of a group.

    Args:
        size: Ranks of a group, of which each has a part of every sequence.
        rank: This one among all.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.place = size, rank % size
        self._group: ProcessGroup | None = None
        self._undo: list[Callable[[], object]] = []
        self._checked: set[int] = set()
        self._is_whole = False

    def attach(self, module: nn.Module) -> None:
        """Let the Hugging Face models of a module run on this rank's part of their tokens.

        Raises:
            MisconfigurationException: If there is none, or one can't be divided.
        """
        self._group, _ = dist.new_subgroups(self.size)
        from lightning_memfit.techniques.core.model_facts import outermost_pretrained  # most runs divide no sequences

        models = outermost_pretrained(module)
        if not models:
            raise MisconfigurationException(
                "`sequence_parallel_size`: the module holds no Hugging Face model, whose attention could be divided."
            )
        _register()
        for model in models:
            self._check(model)
            before = model.config._attn_implementation
            model.set_attn_implementation(_ATTENTION)
            self._undo.append(partial(model.set_attn_implementation, before))
            for child in model.modules():  # attention asks the module that it is called for
                if hasattr(child, "is_causal"):
                    vars(child)["divided_sequences"] = self
                    self._undo.append(partial(vars(child).pop, "divided_sequences", None))
            known = model, inspect.signature(model.forward), _window(model.config.get_text_config())
            self._undo.append(wrap_method(model, "forward", partial(self._run, *known)))

    def detach(self) -> None:
        """Give the models their own way back."""
        while self._undo:
            self._undo.pop()()

    def _check(self, model: Any) -> None:
        config, name = model.config.get_text_config(), type(model).__name__
        heads = config.num_attention_heads
        reason = ""
        if heads % self.size:
            reason = f"its {heads} heads can't be shared equally among {self.size} ranks"
        elif model.config._attn_implementation != "sdpa":
            reason = f"its attention is {model.config._attn_implementation!r}; set `attn_implementation` to 'sdpa'"
        elif model.config.is_encoder_decoder or not hasattr(model, "lm_head"):
            reason = "only causal language models with an `lm_head` can be"
        elif getattr(config, "attn_logit_softcapping", None):
            reason = "attention with a soft cap can't be"
        if reason:
            raise MisconfigurationException(f"`sequence_parallel_size={self.size}`: {name} can't be divided: {reason}.")

    # --- the model --------------------------------------------------------------------------------------------------

    def _run(
        self,
        model: Any,
        signature: inspect.Signature,
        window: int | None,
        inner: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a model on this rank's part; its loss is that of all tokens, on every rank of the group.

        Without labels, logits are those of all tokens; with labels those of this rank's part.

        Raises:
            MisconfigurationException: If the first batch shows that not attention alone mixes tokens.
            ValueError: If it isn't given `input_ids`, or trains without `labels`.
        """
        bound = signature.bind_partial(*args, **kwargs).arguments
        given = {**{key: value for key, value in bound.items() if key != "kwargs"}, **bound.get("kwargs", {})}
        ids, labels = given.pop("input_ids", None), given.pop("labels", None)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or (labels is None and torch.is_grad_enabled()):
            raise ValueError(
                "`sequence_parallel_size`: a model is called with `input_ids` (batch, tokens) and, to train, with "
                "`labels`, of which it computes its loss: that of logits which a module computes itself would be of "
                "a part of the tokens."
            )
        if self._is_whole:
            return inner(*args, **kwargs)
        length = ids.shape[1]
        if window is not None and length > window:
            raise MisconfigurationException(
                f"`sequence_parallel_size={self.size}`: layers of {type(model).__name__} see {window} tokens, which "
                f"sequences of {length} exceed: that can't be divided. Cut them to {window}, or train it without."
            )
        if labels is not None and id(model) not in self._checked and not is_traced():
            self._check_on(model, ids[:1, : 4 * self.size])
        fill = -length % self.size
        positions, mask = given.pop("position_ids", None), given.pop("attention_mask", None)
        mask = _mask(positions, mask, length, fill)
        if mask is not None:  # which layers get as it is, and checkpointing with them
            given["attention_mask"] = mask
        if positions is None:
            positions = torch.arange(length, device=ids.device).unsqueeze(0)
        given |= {"input_ids": self._part(ids, fill, 0), "position_ids": self._part(positions, fill, 0)}
        given["use_cache"] = False
        if labels is None:
            output = inner(**given)
            output.logits = self._gathered(output.logits)[:, :length]
            return output
        following = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        given.setdefault("num_items_in_batch", (following != _IGNORED).sum())
        shifted = self._part(following, fill, _IGNORED)
        output = inner(**given, labels=shifted, shift_labels=shifted)
        output.loss = _SumOverGroup.apply(output.loss, self._group)  # type: ignore[no-untyped-call]
        return output

    def _check_on(self, model: Any, ids: Tensor) -> None:
        """Compare logits and loss of a few tokens, divided and whole, once.

        Raises:
            MisconfigurationException: If they differ: layers such as Mamba's pass something on to later tokens, and a
                loss may have parts that are no sum over tokens, such as that which balances experts.
        """

        def run(rows: int) -> list[Tensor]:
            given = {"input_ids": ids.expand(rows, -1), "use_cache": False}
            return [model(**given).logits[:1], model(**given, labels=given["input_ids"]).loss]

        self._checked.add(id(model))
        with evaluating(model), torch.no_grad():
            divided = run(1)
            self._is_whole = True
            try:
                whole, beside = run(1), run(2)
            finally:
                self._is_whole = False
        for what, one, other, again in zip(("logits", "loss"), divided, whole, beside, strict=True):
            difference, rounding = (float((value - other).abs().max() / other.abs().max()) for value in (one, again))
            if not difference <= max(10 * rounding, 8 * torch.finfo(other.dtype).eps):
                raise MisconfigurationException(
                    f"`sequence_parallel_size={self.size}`: in {type(model).__name__} a token depends on others in "
                    f"layers other than attention, or in its loss ({what}: {difference:.1e} apart). Train it without."
                )

    def _part(self, tokens: Tensor, fill: int, value: int) -> Tensor:
        """This rank's part of `(batch, tokens)`, after as many tokens at the end as make the parts equal."""
        return F.pad(tokens, (0, fill), value=value).chunk(self.size, dim=1)[self.place].contiguous()

    def _gathered(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)

    # --- attention --------------------------------------------------------------------------------------------------

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
    ) -> tuple[Tensor, None]:
        """Attention of whole sequences, some heads on each rank.

        Args:
            query: `(batch, heads, tokens of the part, width)`, as `key` and `value` are.
            key: It may have fewer heads, as may `value`.
            value: See above.
            mask: Which tokens see which, of whole sequences; None if each sees all before it.
            scaling: Of scores; None for torch's own.
            dropout: Share of scores that are left out.

        Returns:
            `(batch, tokens of the part, heads, width)`, and no scores.
        """
        if self._is_whole:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
            return found.transpose(1, 2).contiguous(), None
        if key.shape[1] % self.size:  # fewer heads of keys than ranks: each rank has a copy of those that it needs
            copies = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
        query, key, value = (self._exchanged(one, 1, 2) for one in (query, key, value))
        found = F.scaled_dot_product_attention(
            query, key, value, mask, dropout, mask is None, scale=scaling, enable_gqa=True
        )
        return self._exchanged(found, 2, 1).transpose(1, 2).contiguous(), None

    def _exchanged(self, tensor: Tensor, scattered: int, gathered: int) -> Tensor:
        found: Tensor = _Exchange.apply(tensor, self._group, scattered, gathered)  # type: ignore[no-untyped-call]
        return found


def _window(config: Any) -> int | None:
    """Tokens that layers with a sliding window see; None if all layers see all tokens before theirs."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) if any("sliding" in kind for kind in kinds) else None


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    parallel: SequenceParallel = module.divided_sequences
    return parallel.attention(query, key, value, attention_mask, options.get("scaling"), options.get("dropout", 0.0))


def _mask(positions: Tensor | None, padding: Tensor | None, length: int, fill: int) -> Tensor | None:
    """Which tokens see which, `(batch, 1, tokens, tokens)`; None if each sees all before it.

    Args:
        positions: Position ids, which begin anew with each packed document.
        padding: `(batch, tokens)`; 0 for tokens that nobody sees.
        length: Number of tokens.
        fill: Tokens that are put behind them.
    """
    sees: Tensor | None = None
    if positions is not None and bool((positions.diff(dim=1) != 1).any()):
        document = F.pad((positions.diff(dim=1) != 1).cumsum(1), (1, fill))
        sees = document.unsqueeze(2) == document.unsqueeze(1)
    if padding is not None and not bool(padding.all()):
        seen = F.pad(padding.bool(), (0, fill), value=True).unsqueeze(1)
        sees = seen if sees is None else sees & seen
    if sees is None:
        return None
    whole = length + fill
    causal = torch.ones(whole, whole, dtype=torch.bool, device=sees.device).tril()
    own = torch.eye(whole, dtype=torch.bool, device=sees.device)  # a token of padding sees itself, or its row is NaN
    return ((sees & causal) | own).unsqueeze(1)


class _Exchange(torch.autograd.Function):
    """Give each rank one of equal parts along one dimension, for all parts along another."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, group: Any, scattered: int, gathered: int) -> Tensor:
        ctx.arguments = group, gathered, scattered
        size = dist.get_world_size(group)
        sent = torch.stack(tensor.chunk(size, scattered))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), gathered)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = _Exchange.apply(gradients[0], *ctx.arguments)  # type: ignore[no-untyped-call]
        return found, None, None, None


class _SumOverGroup(torch.autograd.Function):
    """The sum of the losses of a group's parts.

    Strategies average gradients over all ranks, of which each has but its own part's: so that counts once per rank.
    """

    @staticmethod
    @override
    def forward(ctx: Any, loss: Tensor, group: Any) -> Tensor:
        ctx.size = dist.get_world_size(group)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.size, None
