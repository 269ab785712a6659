"""Shorten a module to `TRACED_BLOCKS` of its repeated blocks, for a trace."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_memfit.checkpointing.blocks import find_blocks
from lightning_memfit.profile.repeat import TRACED_BLOCKS

_MIN_BLOCKS = TRACED_BLOCKS + 2
"""Below this, tracing everything costs no more."""

_Signature = tuple[object, ...]


@dataclass(frozen=True)
class Fold:
    """Which repeated blocks a trace follows."""

    blocks: tuple[torch.nn.Module, ...]
    """Blocks that are traced, in order."""
    num_blocks: int
    """Blocks that the module has."""
    block_class: str
    """Class name of a block; empty where there is no repetition."""

    @property
    def is_shortened(self) -> bool:
        """Whether the trace must be unrolled."""
        return self.num_blocks > len(self.blocks)


@dataclass(frozen=True)
class FoldPlan:
    """Which repeated blocks of a module a trace may leave out."""

    container: str
    """Path of the module that holds them."""
    kept: tuple[str, ...]
    """Paths of the blocks that are traced, in order."""
    left_out: tuple[str, ...]
    """Paths of those that are not."""
    block_class: str

    def modules_left_out(self, module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
        """The blocks of the module that need not be copied."""
        return tuple(module.get_submodule(path) for path in self.left_out)

    def apply(self, module: torch.nn.Module) -> Fold:
        """Leave them out, in place.

        Args:
            module: Fake clone; never a user's module.
        """
        kept = tuple(module.get_submodule(path) for path in self.kept)
        if self.left_out:
            container = module.get_submodule(self.container)
            container._modules.clear()
            for index, block in enumerate(kept):
                container.add_module(str(index), block)
        return Fold(kept, len(self.kept) + len(self.left_out), self.block_class)


def fold_blocks(module: torch.nn.Module, shorten: bool = True) -> Fold:
    """Plan and apply at once, in place. For a clone that has built itself."""
    plan = plan_fold(module, shorten)
    return plan.apply(module) if plan else Fold((), 0, "")


def plan_fold(module: torch.nn.Module, shorten: bool = True) -> FoldPlan | None:
    """Find the largest group of repeated blocks, and keep the first four and the last of it; None if there is no group.

    A group is shortened only where its inner blocks agree in class, parameters and settings and no code above them
    counts its blocks, so that tracing some of them tells about all.

    Args:
        module: Not changed.
        shorten: False to keep every block.
    """
    groups = find_blocks(module)
    if not groups:
        return None
    group = max(groups, key=lambda candidate: candidate.num_parameters)
    container = module.get_submodule(group.container)
    alike = len({_signature(block, index) for index, block in enumerate(group.modules) if index}) == 1
    counted = any(_numbers_things(type(above)) for above in _modules_above(module, group.container))
    long = len(group.names) >= _MIN_BLOCKS and len(container._modules) == len(group.names)
    if not (shorten and long and alike and not counted):
        return FoldPlan(group.container, group.names, (), group.class_name)
    first, left_out, last = group.names[: TRACED_BLOCKS - 1], group.names[TRACED_BLOCKS - 1 : -1], group.names[-1]
    return FoldPlan(group.container, (*first, last), left_out, group.class_name)


def _signature(block: torch.nn.Module, index: int) -> _Signature:
    """Everything simple that could make one block behave unlike another; its own index aside."""
    parts: list[object] = []
    for name, child in block.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(child).items())
            if isinstance(value, (bool, int, float, str, type(None)))
            and not (value == index and not isinstance(value, bool) and "id" in key)
        )
        parts.append((name, type(child).__qualname__, settings))
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        parts.append((name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
    return tuple(parts)


def _modules_above(module: torch.nn.Module, path: str) -> Iterator[torch.nn.Module]:
    names = path.split(".") if path else []
    return (module.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1))


_TRUSTED = ("torch", "lightning", "transformers", "lightning_memfit")
"""Packages whose models treat a block by its number only where the block's settings say so."""
_COUNTING = {"enumerate", "range", "zip", "len"}


def _numbers_things(kind: type) -> bool:
    """Whether a class numbers things in a method that may run in training, and could treat one block by its place.

    `if index == 7` would never be seen in a trace of five blocks.
    """
    for base in kind.__mro__:
        if base is object or base.__module__.partition(".")[0] in _TRUSTED:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return True
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", "configure_optimizers"):
                calls = (node.func for node in ast.walk(method) if isinstance(node, ast.Call))
                if any(isinstance(called, ast.Name) and called.id in _COUNTING for called in calls):
                    return True
    return False
