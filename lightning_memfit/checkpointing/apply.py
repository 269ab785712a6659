"""Apply non-reentrant activation checkpointing block by block, and take it off again.

A block's `forward` is replaced on the instance: `state_dict` keys, `isinstance` and forward hooks (FSDP2's included,
which must not run again when the block is recomputed) stay as they are.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from typing_extensions import override

from lightning_memfit.checkpointing.blocks import BlockGroup
from lightning_memfit.checkpointing.forward import ReplacedForward
from lightning_memfit.checkpointing.offload import OffloadedForward, OffloadPool
from lightning_memfit.checkpointing.policies import CHOICES, Choice, kept_operators, selective_contexts

_BatchStatistics = (nn.modules.batchnorm._NormBase,)


class CheckpointedForward(ReplacedForward):
    """Replaces the `forward` of one block that is recomputed.

    Attributes:
        choice: The activations that are kept.
        inputs_on_host: Pool that keeps the block's inputs in host memory; None keeps them on the device.
    """

    def __init__(self, block: nn.Module, choice: Choice) -> None:
        super().__init__(block)
        self.choice = choice
        self.inputs_on_host: OffloadPool | None = None
        self.has_statistics = any(isinstance(module, _BatchStatistics) for module in block.modules())

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; with gradients on, keep only the activations that the choice keeps."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        _refuse_caches(self.block, (*args, *kwargs.values()))
        return self.run(self.inner, *args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the block so that it is recomputed in backward."""
        if self.inputs_on_host is None:
            return checkpoint(function, *args, use_reentrant=False, **self.options(), **kwargs)
        # Autograd saves positional inputs only.
        positional = partial(_with_keywords, function, tuple(kwargs))
        with self.inputs_on_host.saving(self.block):
            return checkpoint(positional, *args, *kwargs.values(), use_reentrant=False, **self.options())

    def options(self) -> dict[str, Any]:
        """Options of `torch.utils.checkpoint`: contexts of the forward pass and the recomputation, if needed."""
        kept = kept_operators(self.choice)
        if self.has_statistics:
            if torch.compiler.is_compiling():
                # Compiled checkpointing counts a batch twice in running statistics. Raising this while tracing makes
                # the compiler leave the block to eager execution; with fullgraph=True the error reaches the user.
                raise NotImplementedError(f"{type(self.block).__name__} has running statistics: not compiled.")
            return {"context_fn": partial(_with_frozen_statistics, kept, self.block)}
        return {"context_fn": selective_contexts(kept)} if kept else {}


class AppliedCheckpointing:
    """Checkpointing in effect on some blocks; `remove` puts every block back as it was."""

    def __init__(self, forwards: Sequence[ReplacedForward]) -> None:
        self._forwards = list(forwards)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are checkpointed."""
        return len(self._forwards)

    def remove(self) -> None:
        """Restore each block's `forward`. Safe to call twice."""
        while self._forwards:
            wrapper = self._forwards.pop()
            if vars(wrapper.block).get("forward") is not wrapper:
                raise RuntimeError(
                    f"`forward` of a {type(wrapper.block).__name__} was replaced after checkpointing was applied; "
                    "take off what came later first."
                )
            if wrapper.shadowed is None:
                del wrapper.block.forward
            else:
                wrapper.block.forward = wrapper.shadowed


def apply_checkpointing(blocks: Sequence[nn.Module], choices: Sequence[Choice]) -> AppliedCheckpointing:
    """Checkpoint blocks, each by its own choice. Gradients and random numbers are those of the plain run.

    Args:
        blocks: Modules, for example those of `find_blocks`.
        choices: One per block: `none`, `full`, `keep_attention`, `keep_matmul`, `keep_matmul_attention` or `offload`.

    Raises:
        ValueError: If the lengths differ, a choice is unknown, a block is listed twice, or something checkpoints
            already.
    """
    if len(blocks) != len(choices):
        raise ValueError(f"`choices` has {len(choices)} entries for {len(blocks)} blocks; give one per block.")
    unknown = sorted({choice for choice in choices if choice not in CHOICES})
    if unknown:
        raise ValueError(f"`choices` holds {', '.join(map(repr, unknown))}. Choose from {', '.join(CHOICES)}.")
    if len({id(block) for block in blocks}) != len(blocks):
        raise ValueError("`blocks` lists a module twice; list it once (each of its calls is checkpointed).")
    for block in blocks:
        refuse_checkpointed(block)
    pool = OffloadPool()
    forwards: list[ReplacedForward] = [
        OffloadedForward(block, pool) if choice == "offload" else CheckpointedForward(block, choice)
        for block, choice in zip(blocks, choices, strict=True)
        if choice != "none"
    ]
    for wrapper in forwards:
        wrapper.block.forward = wrapper
    return AppliedCheckpointing(forwards)


def refuse_checkpointed(module: nn.Module) -> None:
    """Raise a `ValueError` if anything in a module checkpoints activations already."""
    for name, child in module.named_modules():
        where = f"{type(child).__name__}{f' ({name!r})' if name else ''}"
        if _hugging_face_checkpoints(child):
            raise ValueError(
                f"{where} has Hugging Face gradient checkpointing on already. Call "
                "`model.gradient_checkpointing_disable()` "
                "(and leave `gradient_checkpointing_enable` out), or leave this checkpointing out."
            )
        if _is_wrapped(child):
            raise ValueError(f"{where} is checkpointed already. Remove one of the two.")


def is_checkpointed(module: nn.Module) -> bool:
    """Whether anything in a module checkpoints activations already."""
    return any(_hugging_face_checkpoints(child) or _is_wrapped(child) for child in module.modules())


def _hugging_face_checkpoints(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


def _is_wrapped(module: nn.Module) -> bool:
    return type(module).__name__ == "CheckpointWrapper" or isinstance(vars(module).get("forward"), ReplacedForward)


def disable_caches(module: nn.Module) -> Callable[[], None]:
    """Set `use_cache=False` in every Hugging Face config of a module, with one warning.

    A block that appends to a key/value cache would do so again when it is recomputed.

    Returns:
        A function that restores the settings.
    """
    configs = {id(config): config for config in _configs(module) if getattr(config, "use_cache", False)}
    if configs:
        names = ", ".join(sorted({type(config).__name__ for config in configs.values()}))
        warnings.warn(
            f"`use_cache=True` in {names} makes training keep keys and values it never uses, and cannot work with "
            "activation checkpointing: it is off while checkpointing is applied. Set `model.config.use_cache = "
            "False` to silence this.",
            stacklevel=2,
        )
    for config in configs.values():
        config.use_cache = False

    def enable() -> None:
        for config in configs.values():
            config.use_cache = True

    return enable


def _configs(module: nn.Module) -> Iterator[Any]:
    for child in module.modules():
        config = vars(child).get("config")
        if _is_hugging_face_config(config):
            yield config
            yield from filter(_is_hugging_face_config, vars(config).values())


def _is_hugging_face_config(value: object) -> bool:
    """Whether an attribute is what transformers means by `config`, not a user's own of that name."""
    return any(cls.__name__ in ("PreTrainedConfig", "PretrainedConfig") for cls in type(value).__mro__)


def _refuse_caches(block: nn.Module, values: tuple[Any, ...]) -> None:
    for value in values:
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            raise ValueError(
                f"{type(block).__name__} was called with a key/value cache ({type(value).__name__}) while gradients "
                "are on; recomputing it would fill the cache twice. Call the model with `use_cache=False` in training."
            )


def _with_keywords(function: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    """Call a function with the last values as keyword arguments."""
    first = len(values) - len(names)
    return function(*values[:first], **dict(zip(names, values[first:], strict=True)))


def _with_frozen_statistics(kept: frozenset[Any], block: nn.Module) -> tuple[Any, Any]:
    forward, recompute = selective_contexts(kept)() if kept else noop_context_fn()
    return forward, _both(recompute, _frozen_statistics(block))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Recompute BatchNorm and InstanceNorm without counting the batch a second time in their running statistics."""
    norms = [m for m in block.modules() if isinstance(m, _BatchStatistics) and m.training and m.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, momentum, num_batches in before:
            norm.momentum = momentum
            norm.num_batches_tracked = num_batches


# --- segments of an nn.Sequential -------------------------------------------------------------------------------------

# Segments of about sqrt(n) blocks (Chen et al., 2016, arXiv 1604.06174) save memory where blocks are thin. Blocks of
# transformers have inputs that are small compared with their inner activations: checkpointing each block by itself
# needs less memory there.


class SegmentedForward(CheckpointedForward):
    """Replaces the `forward` of an nn.Sequential and keeps only the inputs of its segments."""

    def __init__(self, container: nn.Sequential) -> None:
        super().__init__(container, "full")
        self.segment_size = math.ceil(math.sqrt(len(container)))

    @override
    def __call__(self, value: Any) -> Any:
        """Run segment after segment."""
        if not torch.is_grad_enabled():
            return self.inner(value)
        children = list(self.block.children())
        for start in range(0, len(children), self.segment_size):
            value = self.run(partial(_run, children[start : start + self.segment_size]), value)
        return value


def apply_segments(module: nn.Module, groups: Sequence[BlockGroup]) -> AppliedCheckpointing:
    """Checkpoint the containers of some groups in segments of ceil(sqrt(n)) of their n children.

    Raises:
        ValueError: If a container is not a plain nn.Sequential: other code that calls the blocks can't be cut.
    """
    containers = [_container(module, group) for group in groups]
    for container in containers:
        refuse_checkpointed(container)
    forwards = [SegmentedForward(container) for container in containers]
    for wrapper in forwards:
        wrapper.block.forward = wrapper
    return AppliedCheckpointing(forwards)


def _container(module: nn.Module, group: BlockGroup) -> nn.Sequential:
    container = dict(module.named_modules()).get(group.container)
    if not isinstance(container, nn.Sequential) or type(container).forward is not nn.Sequential.forward:
        raise ValueError(
            f"`mode='sqrt'`: the blocks {group.names[0]!r} ... are called one by one by code of "
            f"{type(container).__name__}, not by a plain nn.Sequential, so that they cannot be joined into segments. "
            "Use mode='full', which for blocks with much inside needs less memory anyway."
        )
    return container


def _run(children: list[nn.Module], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
