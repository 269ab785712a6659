"""Apply non-reentrant activation checkpointing block by block, and take it off again.

A block's `forward` is replaced on the instance: `state_dict` keys, `isinstance` and forward hooks (FSDP2's included,
which must not run again when the block is recomputed) stay as they are.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_memfit.checkpointing.check import FirstCall
from lightning_memfit.checkpointing.policies import CHOICES, Choice, compiled_contexts, kept_operators
from lightning_memfit.checkpointing.recompute import Knowledge, ReplacedForward

if TYPE_CHECKING:
    from lightning_memfit.checkpointing.offload import OffloadPool


class CheckpointedForward(ReplacedForward):
    """Replaces the `forward` of one block that is recomputed.

    Attributes:
        choice: The activations that are kept.
        inputs_on_host: Pool that keeps the block's inputs in host memory; None keeps them on the device.
    """

    def __init__(self, block: nn.Module, choice: Choice, inputs_on_host: "OffloadPool | None" = None) -> None:
        super().__init__(block)
        self.choice = choice
        self.inputs_on_host = inputs_on_host
        self._knowledge = Knowledge(block)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; with gradients on, keep only the activations that the choice keeps."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        known, kept = self._knowledge, kept_operators(self.choice)
        if torch.compiler.is_compiling():
            if self.inputs_on_host is not None:
                raise NotImplementedError(f"the inputs of {type(self.block).__name__} are offloaded: not compiled.")
            if any(True for _ in self.block.buffers()):
                # It makes the compiler leave the block to eager execution; with fullgraph=True the error reaches users.
                raise NotImplementedError(f"{known.name} has buffers, which recomputation might change: not compiled.")
            options: dict[str, Any] = {"context_fn": compiled_contexts(kept)} if kept else {}
            return checkpoint(self.inner, *args, use_reentrant=False, **options, **kwargs)
        around = None if self.inputs_on_host is None else partial(self.inputs_on_host.saving, self.block)
        if known.is_new():
            return FirstCall(self.inner, known, kept, around).run(args, kwargs)
        return known.run(self.inner, kept, args, kwargs, around)


class AppliedCheckpointing:
    """Checkpointing in effect on some blocks; `remove` puts every block back as it was."""

    def __init__(self, forwards: Sequence[ReplacedForward]) -> None:
        self._forwards = list(forwards)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are checkpointed."""
        return len(self._forwards)

    def is_on(self, module: nn.Module) -> bool:
        """Whether these blocks are all that is checkpointed in a module."""
        return {id(child) for child in _checkpointed(module)} == {id(wrapper.block) for wrapper in self._forwards}

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
        choices: One per block, of `CHOICES`.

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
    forwards = _forwards(blocks, choices)
    for wrapper in forwards:
        wrapper.block.forward = wrapper
    return AppliedCheckpointing(forwards)


def _forwards(blocks: Sequence[nn.Module], choices: Sequence[Choice]) -> list[ReplacedForward]:
    if {"offload", "offload_inputs"}.isdisjoint(choices):
        return [CheckpointedForward(block, one) for block, one in zip(blocks, choices, strict=True) if one != "none"]
    # What follows memory on the host, which recomputation alone has no use for.
    from lightning_memfit.checkpointing.offload import OffloadedForward, OffloadPool

    pool = OffloadPool()
    return [
        OffloadedForward(block, pool)
        if choice == "offload"
        else CheckpointedForward(block, choice, pool if choice == "offload_inputs" else None)
        for block, choice in zip(blocks, choices, strict=True)
        if choice != "none"
    ]


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
    return bool(_checkpointed(module))


def _checkpointed(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.modules() if _hugging_face_checkpoints(child) or _is_wrapped(child)]


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
