"""Policies of activation checkpointing: the modes that people name, and the choice per block that each means."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_memfit.memory.generators import random_states, set_random_states

Choice = Literal["none", "full", "keep_attention", "keep_matmul", "keep_matmul_attention", "offload", "offload_inputs"]
"""`none` keeps all activations of a block, `full` only its inputs, `keep_...` its inputs and the outputs they name;
`offload` keeps them all in host memory, `offload_inputs` its inputs there."""

CHOICES: tuple[Choice, ...] = get_args(Choice)

Mode = Literal["none", "full", "every", "selective", "offload", "offload_inputs"]
MODES: tuple[Mode, ...] = get_args(Mode)

_aten = torch.ops.aten
# Products with weights. `bmm` is left out: in attention without a fused kernel it makes the scores, which checkpointing
# is meant to save.
MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default})
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
_KEPT: dict[Choice, frozenset[Any]] = {
    "keep_attention": ATTENTION,
    "keep_matmul": MATMULS,
    "keep_matmul_attention": MATMULS | ATTENTION,
}
Keep = Literal["attention", "matmul"]
_CHOICE_OF_KEEP: dict[frozenset[str], Choice] = {
    frozenset({"attention"}): "keep_attention",
    frozenset({"matmul"}): "keep_matmul",
    frozenset({"attention", "matmul"}): "keep_matmul_attention",
}


def choices_for(
    mode: Mode, num_blocks: int, every: int | None = None, keep: tuple[Keep, ...] = ()
) -> tuple[Choice, ...]:
    """Translate a mode to one choice per block.

    Args:
        mode: One of `MODES`; with `every`, one block in `every` is recomputed, beginning with the first.
        num_blocks: Number of blocks.
        every: Needed by `every`, at least 1.
        keep: Needed by `selective`: `attention`, `matmul` or both.

    Raises:
        ValueError: If an argument is missing, out of range, or belongs to another mode.
    """
    check_mode(mode, every, keep)
    if mode == "every":
        assert every is not None
        return tuple("full" if index % every == 0 else "none" for index in range(num_blocks))
    if mode == "selective":
        return (_CHOICE_OF_KEEP[frozenset(keep)],) * num_blocks
    return (mode,) * num_blocks


def check_mode(mode: str, every: int | None, keep: tuple[str, ...]) -> None:
    """Raise a `ValueError` unless the arguments of a mode fit together."""
    if mode not in MODES:
        raise ValueError(f"`mode={mode!r}` is unknown. Choose from {', '.join(MODES)}.")
    if (mode == "every") != (every is not None):
        raise ValueError(f"`every={every}` with `mode={mode!r}`: give `every` with mode='every', and only there.")
    if every is not None and every < 1:
        raise ValueError(f"`every={every}` must be at least 1 (1 checkpoints every block).")
    if (mode == "selective") != bool(keep):
        raise ValueError(
            f"`keep={list(keep)}` with `mode={mode!r}`: give `keep` with mode='selective', and only there."
        )
    if keep and frozenset(keep) not in _CHOICE_OF_KEEP:
        raise ValueError(f"`keep={list(keep)}` must hold 'attention', 'matmul' or both.")


def kept_operators(choice: Choice) -> frozenset[Any]:
    """Operators whose outputs a choice keeps; empty for `full` and `offload_inputs`."""
    return _KEPT.get(choice, frozenset())


def compiled_contexts(kept: frozenset[Any]) -> Callable[[], tuple[Any, Any]]:
    """Make the `context_fn` of `torch.utils.checkpoint` that keeps the outputs of these operators in a compiled block.

    The compiler gives every operator that it recomputes its own random numbers.
    """
    return partial(create_selective_checkpoint_contexts, list(kept))


class WatchedWrites:
    """Notes whether outputs that are kept are written in place afterwards, which torch doesn't always see.

    Attributes:
        found: Whether any has been.
    """

    def __init__(self) -> None:
        self.found = False
        self._kept: dict[int, Any] = {}

    def look(self, operator: Any, args: tuple[Any, ...], output: Any, is_kept: bool) -> None:
        """Look at an operator that has run."""
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.found |= value.untyped_storage()._cdata in self._kept
        for value in tree_leaves(output) if is_kept else ():
            if isinstance(value, Tensor):
                self._kept[value.untyped_storage()._cdata] = value.untyped_storage()


def selective_contexts(
    kept: frozenset[Any], writes: WatchedWrites | None = None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one forward pass and of its recomputation, in which the outputs of these operators are kept.

    torch runs no kept operator again, and leaves out the random numbers that it drew: fused attention on CUDA applies
    its dropout itself. The random state behind each such call is noted, and the recomputation moves on to it.
    """
    if not kept:
        return nullcontext(), nullcontext()
    states: list[dict[torch.device, Tensor]] = []
    forward, recompute = create_selective_checkpoint_contexts(partial(_policy, kept, states, writes))
    return forward, _Skips(recompute, kept, states)


def _policy(
    kept: frozenset[Any],
    states: list[dict[torch.device, Tensor]],
    writes: WatchedWrites | None,
    context: Any,
    operator: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    if writes is not None and not context.is_recompute:
        writes.look(operator, args, context.op_output, operator in kept)
    if operator not in kept:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if not context.is_recompute and _draws(operator, args, kwargs):
        device = _device_of(args)
        if device.type != "meta" and torch._guards.detect_fake_mode(args) is None:  # a trace has no values
            with _disable_current_modes():
                states.append(random_states([device]))
    return CheckpointPolicy.MUST_SAVE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers: attention without dropout doesn't."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True


def _device_of(args: tuple[Any, ...]) -> torch.device:
    return next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))


class _Skips(TorchDispatchMode):
    """torch's context of a recomputation, which moves the random state on to where it was behind each kept call."""

    def __init__(
        self, recompute: AbstractContextManager[Any], kept: frozenset[Any], states: list[dict[torch.device, Tensor]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recompute = recompute
        self._kept = kept
        self._states = states

    @override
    def __enter__(self) -> Any:
        self._recompute.__enter__()
        self._left = iter(self._states)
        return super().__enter__() if self._states else self  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *error: Any) -> None:
        if self._states:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._recompute.__exit__(*error)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._kept and _draws(func, args, kwargs or {}):
            with _disable_current_modes():
                set_random_states(next(self._left))
        return result
