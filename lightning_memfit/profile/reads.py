"""What code reads besides its arguments: globals, attributes, imports and the environment, and which code is looked at.

Only the user's code is read. Libraries' is covered by their versions, as far as nobody put something else there.
"""

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from dis import opmap
from functools import lru_cache
from importlib.util import find_spec
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from lightning_memfit.profile.culprit import owner_of

_GLOBAL_BY_NAME = opmap["LOAD_NAME"]
_GLOBAL = opmap["LOAD_GLOBAL"]
_IMPORT = opmap["IMPORT_NAME"]
_EXTENDED = opmap["EXTENDED_ARG"]
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0
"""The lowest bit of the argument has another meaning since Python 3.11."""

_READS_ANYTHING = frozenset({"eval", "exec", "globals", "__import__"})
"""Builtin functions by which code reads what it doesn't name."""

_MAPPINGS, _GETTERS = ("environ", "environb"), ("getenv", "getenvb")
"""What `os` has for environment variables."""

_POINTER_BYTES = 8

_CACHED_FUNCTION = type(lru_cache(lambda: None))
"""Its function is an attribute, and what it has computed follows from that."""


class Undescribed(ValueError):
    """What a value holds can't be told, so that no description of it is complete."""


@dataclass(frozen=True)
class Names:
    """What a code object and those inside it name."""

    globals: tuple[str, ...]
    """Names that are looked up outside of the functions."""
    attributes: frozenset[str]
    """All names, those of attributes among them."""
    imports: tuple[str, ...]

    @property
    def environment(self) -> bool:
        """Whether it asks for environment variables."""
        return bool(self.attributes & {*_MAPPINGS, *_GETTERS})


@lru_cache(4096)
def names_in(code: CodeType) -> Names:
    """The names in a code object, sorted."""
    found: dict[int, set[str]] = {_GLOBAL: set(), _IMPORT: set()}
    attributes: set[str] = set()
    _collect(code, found, attributes)
    return Names(tuple(sorted(found[_GLOBAL])), frozenset(attributes), tuple(sorted(found[_IMPORT])))


def _collect(code: CodeType, found: dict[int, set[str]], attributes: set[str]) -> None:
    extended, instructions, names = 0, code.co_code, code.co_names
    attributes.update(names)
    for at in range(0, len(instructions), 2):
        operation, argument = instructions[at], instructions[at + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation == _GLOBAL:
            found[_GLOBAL].add(names[argument >> _GLOBAL_SHIFT])
        elif operation == _GLOBAL_BY_NAME:
            found[_GLOBAL].add(names[argument])
        elif operation == _IMPORT:
            found[_IMPORT].add(names[argument])
    for constant in code.co_consts:
        if type(constant) is CodeType:
            _collect(constant, found, attributes)


def globals_of(function: FunctionType, names: Names) -> list[tuple[str, Any]]:
    """The globals that a function names, and the modules that it imports, as far as they are there.

    Raises:
        Undescribed: If it may read others than those, or imports a module of the user's that is yet to be imported.
    """
    space = function.__globals__
    anything = [name for name in names.globals if name in _READS_ANYTHING and name not in space]
    if anything:
        raise Undescribed(f"`{function.__qualname__}` calls `{anything[0]}`, which may read anything")
    package = str(space.get("__package__") or "")
    imported = [(name, module) for name in names.imports for module in _imported(name, package)]
    return [(name, space[name]) for name in names.globals if name in space] + imported


def _imported(name: str, package: str) -> list[ModuleType]:
    """Modules that an import statement of a package's module may mean."""
    found = [sys.modules[meant] for meant in meanings(name, package) if meant in sys.modules]
    top = name.partition(".")[0]
    if not found and top and top not in sys.stdlib_module_names:
        spec = find_spec(top)
        if spec is not None and owner_of(spec.origin or "") == "user":
            raise Undescribed(f"`{name}` is not imported yet")
    return found


def meanings(name: str, package: str) -> list[str]:
    """Full names that a module's name in an import statement may stand for, whatever the statement's level.

    Args:
        name: The name without its leading dots; empty in `from . import`.
        package: The package of the module whose statement it is; empty for one outside of packages.
    """
    parts = package.split(".") if package else []
    return [name, *(".".join([*parts[:end], *([name] if name else [])]) for end in range(1, len(parts) + 1))]


def is_users_function(function: FunctionType) -> bool:
    """Whether code is the user's or was generated, as that of data classes."""
    filename = function.__code__.co_filename
    if filename.startswith("<"):
        return not filename.startswith("<frozen")
    return owner_of(filename) == "user"


def is_users_module(name: str) -> bool:
    """Whether a module of that name is the user's; so is one without a file, such as an interactive session's."""
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return False
    for named in (name, package):
        path = getattr(sys.modules.get(named), "__file__", None)
        if isinstance(path, str):
            return owner_of(path) == "user"
    return True


@lru_cache(4096)
def is_opaque(kind: type) -> bool:
    """Whether objects of a class hold something in C that can't be read as attributes or items."""
    for base in kind.__mro__:
        if base.__base__ is None or base is _CACHED_FUNCTION:
            continue
        known = sum(type(member) is MemberDescriptorType for member in vars(base).values())
        known += base.__dictoffset__ > 0 and not base.__base__.__dictoffset__
        known += base.__weakrefoffset__ > 0 and not base.__base__.__weakrefoffset__
        if base.__basicsize__ - base.__base__.__basicsize__ > known * _POINTER_BYTES:
            return True
    return False


# --- environment variables, by the source of a module -----------------------------------------------------------------


@lru_cache(4096)
def variables_in(source: str) -> frozenset[str] | None:
    """Names of the environment variables that a module's source asks for; None if it may ask for any.

    Names count that are written as texts, or as names that are given one text in the module. Variables that are only
    set are none.

    Args:
        source: Python code. None is returned for what isn't, if it has a word that asks for them.
    """
    # Most files don't have one. Python takes other letters in a name for those of ASCII that they look like.
    if source.isascii() and not any(word in source for word in (*_MAPPINGS, *_GETTERS)):
        return frozenset()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes = list(ast.walk(tree))
    texts, known = _texts_by_name(nodes), set[str]()
    told: set[int] = set()
    for node in nodes:
        where, names = _asked(node)
        if where is None or _name_of(where) not in (*_MAPPINGS, *_GETTERS):
            continue
        told.add(id(where))
        for name in names:
            text = texts.get(name.id) if isinstance(name, ast.Name) else getattr(name, "value", None)
            if not isinstance(text, (str, bytes)):
                return None
            known.add(text if isinstance(text, str) else text.decode(errors="replace"))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and any(
            one.name in _MAPPINGS + _GETTERS and one.asname for one in node.names
        ):
            return None
        if (
            isinstance(node, (ast.Name, ast.Attribute))
            and _name_of(node) in _MAPPINGS + _GETTERS
            and id(node) not in told
        ):
            return None
    return frozenset(known)


def _asked(node: ast.AST) -> tuple[ast.expr | None, list[ast.expr]]:
    """What code looks names up in, which may be the environment, and the names; none where it only sets some."""
    if isinstance(node, ast.Subscript):
        return node.value, [node.slice] if isinstance(node.ctx, ast.Load) else []
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return node.comparators[0], [node.left]
    if isinstance(node, ast.Call) and node.args:
        function = node.func
        if _name_of(function) in _GETTERS:
            return function, node.args[:1]
        if isinstance(function, ast.Attribute) and function.attr in ("get", "pop", "setdefault"):
            return function.value, node.args[:1]
    return None, []


def _name_of(node: ast.AST) -> str:
    """The last name of `os.environ` or `environ`; empty for other code."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _texts_by_name(nodes: list[ast.AST]) -> dict[str, str]:
    """Names that are assigned once in a module, to a text."""
    stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    stored.update(node.arg for node in nodes if isinstance(node, ast.arg))
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = getattr(node.targets[0], "id", "")
            if stored[name] == 1 and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found[name] = node.value.value
    return found
