"""Find the repeated blocks of any module by its structure alone."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_SMALL_SHARE = 0.05


@dataclass(frozen=True)
class BlockGroup:
    """Neighbouring blocks of one class, in the order of their container."""

    container: str
    """Dotted name of the module that holds them; empty for the outermost."""
    names: tuple[str, ...]
    """Dotted names of the blocks."""
    modules: tuple[nn.Module, ...]

    @property
    def class_name(self) -> str:
        """Class of the blocks."""
        return type(self.modules[0]).__name__

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements, shared ones once."""
        return sum(p.numel() for p in {id(p): p for m in self.modules for p in m.parameters()}.values())


def find_blocks(module: nn.Module) -> list[BlockGroup]:
    """Find groups of two or more blocks of one class inside a ModuleList or Sequential.

    The outermost groups are taken, with one exception: for stages that differ from each other and consist of blocks
    (ResNet, Swin), their inner groups are taken. Blocks are modules with sub-modules and parameters; a class with under
    5 % of the parameters of all groups (a pair of heads, say) is left out. Only shapes are read, so that this works on
    fake and meta tensors.

    Returns:
        Groups in the order in which the module lists them; empty if there are none.
    """
    groups = _groups_below(module, "")
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group.class_name] = sizes.get(group.class_name, 0) + group.num_parameters
    total = sum(sizes.values())
    return [group for group in groups if sizes[group.class_name] >= _SMALL_SHARE * total]


def select_blocks(module: nn.Module, blocks: str | Sequence[str]) -> list[BlockGroup]:
    """Select blocks by class names, dotted names of blocks, or dotted names of their containers.

    Raises:
        ValueError: If a name is none of these (lists the closest names), or if one block is inside another.
    """
    wanted = [blocks] if isinstance(blocks, str) else list(blocks)
    named = {name: child for name, child in module.named_modules() if name}
    classes = {type(child).__name__ for child in named.values()}
    groups = []
    for name in wanted:
        if name in classes:
            found = {key: child for key, child in named.items() if type(child).__name__ == name}
        elif isinstance(named.get(name), _CONTAINERS):
            found = {f"{name}.{key}": child for key, child in named[name].named_children()}
        elif name in named:
            found = {name: named[name]}
        else:
            close = difflib.get_close_matches(name, [*classes, *named], n=5)
            raise ValueError(
                f"`blocks={name!r}` is no class and no sub-module here. Close: {', '.join(close) or 'nothing'}."
            )
        groups.append(BlockGroup(name if name in named else "", tuple(found), tuple(found.values())))
    names = [block for group in groups for block in group.names]
    if not names:
        raise ValueError(
            f"`blocks={blocks!r}` name nothing to checkpoint. Leave it out to have blocks found by structure."
        )
    _refuse_nested(names)
    return groups


def _refuse_nested(names: list[str]) -> None:
    for index, outer in enumerate(names):
        for other, inner in enumerate(names):
            if other != index and f"{inner}.".startswith(f"{outer}."):
                raise ValueError(f"`blocks` names {outer!r} and {inner!r} inside it. Name only one of them.")


def _groups_below(module: nn.Module, name: str) -> list[BlockGroup]:
    own = list(_own_groups(module, name)) if isinstance(module, _CONTAINERS) else []
    grouped = {id(block) for group in own for block in group.modules}
    result = []
    for group in own:
        inner = [
            found for key, block in zip(group.names, group.modules, strict=True) for found in _groups_below(block, key)
        ]
        result.extend(inner if inner and _are_stages(group, inner) else [group])
    for key, child in module.named_children():
        if id(child) not in grouped:
            result.extend(_groups_below(child, f"{name}.{key}" if name else key))
    return result


def _own_groups(container: nn.Module, name: str) -> Iterator[BlockGroup]:
    by_class: dict[type, dict[str, nn.Module]] = {}
    for key, child in container.named_children():  # each module once, even if it is listed twice
        if any(True for _ in child.children()) and any(True for _ in child.parameters()):
            by_class.setdefault(type(child), {})[f"{name}.{key}" if name else key] = child
    for found in by_class.values():
        if len(found) >= 2 and not isinstance(
            next(iter(found.values())), nn.ModuleList
        ):  # a ModuleList is never called
            yield BlockGroup(name, tuple(found), tuple(found.values()))


def _are_stages(group: BlockGroup, inner: list[BlockGroup]) -> bool:
    """Whether all members differ in parameter shapes, and groups of real blocks inside them hold most parameters."""
    shapes = {tuple(sorted(tuple(p.shape) for p in block.parameters())) for block in group.modules}
    differ = len(shapes) == len(group.modules)
    holds_most = 2 * sum(found.num_parameters for found in inner) > group.num_parameters
    return differ and holds_most and (isinstance(group.modules[0], nn.Sequential) or any(map(_is_deep, inner)))


def _is_deep(group: BlockGroup) -> bool:
    """Whether some block has grandchildren, unlike a convolution with its norm and activation."""
    return any(True for block in group.modules for child in block.children() for _ in child.children())
