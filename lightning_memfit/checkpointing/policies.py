"""Policies of activation checkpointing: the modes that people name, and the choice per block that each means."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from typing_extensions import override

Choice = Literal["none", "full", "keep_attention", "keep_matmul", "keep_matmul_attention", "offload"]
"""`none` keeps all activations of a block, `full` only its inputs, `keep_...` its inputs and the outputs they name;
`offload` keeps them all, in host memory."""

CHOICES: tuple[Choice, ...] = get_args(Choice)

Mode = Literal["none", "full", "every", "sqrt", "selective", "offload"]
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
    """Translate a mode to one choice per block. `sqrt` works on segments of blocks and is not one of these modes.

    Args:
        mode: `none`, `full`, `offload`, `every` (one block in `every`, beginning with the first) or `selective`.
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
    if mode == "sqrt":
        raise ValueError("`mode='sqrt'` checkpoints segments of several blocks and has no choice per block.")
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
    """Operators whose outputs a choice keeps; empty for `full`."""
    return _KEPT.get(choice, frozenset())


def compiled_contexts(kept: frozenset[Any]) -> Callable[[], tuple[Any, Any]]:
    """Make the `context_fn` of `torch.utils.checkpoint` that keeps the outputs of these operators in a compiled block.

    The compiler gives every operator that it recomputes its own random numbers.
    """
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept))


Contexts = tuple[AbstractContextManager[Any], ...]
"""To be entered in this order, the last seeing each operator first."""


def selective_contexts(kept: frozenset[Any]) -> tuple[Contexts, Contexts]:
    """Contexts of one forward pass and of its recomputation, in which the outputs of these operators are kept.

    torch runs no kept operator again, and leaves out the random numbers that it drew: fused attention on CUDA applies
    its dropout itself. Without the second context of each, what is drawn behind it would be other numbers.

    Args:
        kept: Operators; if there are none, there is no context.
    """
    if not kept:
        return (), ()
    forward, recompute = compiled_contexts(kept)()
    drawing = frozenset(operator for operator in kept if torch.Tag.nondeterministic_seeded in operator.tags)
    if not drawing:
        return (forward,), (recompute,)
    states: list[Tensor] = []
    return (forward, _Draws(drawing, states)), (recompute, _Skips(drawing, states))


def _policy(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator that may draw random numbers does: attention without dropout doesn't."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True


class _Draws(TorchDispatchMode):
    """Notes the random state of the device behind every call of operators that draw.

    Args:
        operators: Operators whose outputs are kept.
        states: Gets the states.
    """

    def __init__(self, operators: frozenset[Any], states: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators
        self._states = states

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._operators and _draws(func, args, kwargs or {}):
            device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if device.type != "meta" and torch._guards.detect_fake_mode(args) is None:  # a trace has no values
                with _disable_current_modes():
                    self._behind(device)
        return result

    def _behind(self, device: torch.device) -> None:
        self._states.append(
            torch.get_rng_state()
            if device.type == "cpu"
            else torch.get_device_module(device.type).get_rng_state(device)
        )


class _Skips(_Draws):
    """Moves the random state on to where it was behind each call, as the calls are not made again."""

    @override
    def __enter__(self) -> Any:
        self._left = iter(self._states)
        return super().__enter__()  # type: ignore[no-untyped-call]

    @override
    def _behind(self, device: torch.device) -> None:
        state = next(self._left)
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device.type).set_rng_state(state, device)
